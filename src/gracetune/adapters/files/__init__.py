"""Adapter files: read, convert, merge, extract and check."""
