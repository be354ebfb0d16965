"""Run files: their schema, how they are read, and the rules that span sections."""
