"""CUDA unified (managed) memory on stock PyTorch: hardware detection, pools, hints, statistics."""
