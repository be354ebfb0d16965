"""Optimizers, learning-rate schedules, and optimizer state in host memory."""
