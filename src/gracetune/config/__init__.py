"""Run files: the schema of their settings, loading, keys of other tools, and consistency checks."""
