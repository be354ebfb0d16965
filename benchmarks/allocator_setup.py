"""Turn on torch's expandable segments as `gracetune train` does. Import this before torch."""

from gracetune.config.environment import prefer_expandable_segments

prefer_expandable_segments()
