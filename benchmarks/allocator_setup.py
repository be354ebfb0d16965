"""Configure torch's allocator as `gracetune train` does; import this before torch."""

from gracetune.config.environment import prefer_expandable_segments

prefer_expandable_segments()
