"""Experiment trackers: each turns run events into one tool's format."""
