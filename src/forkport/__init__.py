"""Keeping a fork alive: its delta as patches, put back onto a newer upstream, and undone."""
