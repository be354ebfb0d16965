"""Cache encoded latents and text embeddings, so that no sample or prompt is encoded twice."""
