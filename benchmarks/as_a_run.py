"""Torch's allocator as `gracetune train` has it: import this before torch."""

from gracetune.config.environment import prefer_growing_segments

prefer_growing_segments()
