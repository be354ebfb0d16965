"""Datasets: read and decode samples, sort them into buckets of equal size, and form batches."""
