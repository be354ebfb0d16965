"""Test doubles: a simulated CUDA driver and miniature models."""
