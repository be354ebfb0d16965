"""Unified memory on stock PyTorch: what the hardware is, pools, hints, stages, statistics."""
