"""Samples: where they come from, how they are grouped, and the order in which a run sees them."""
