"""Encoded latents and texts, kept so that nothing is encoded twice."""
