"""Model families: one file each, behind one protocol."""
