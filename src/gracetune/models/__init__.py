"""Model families: one module per family, all with the same protocol (see `family.py`)."""
