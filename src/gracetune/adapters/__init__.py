"""Adapters: small trainable weights added to a model whose own weights are frozen."""
