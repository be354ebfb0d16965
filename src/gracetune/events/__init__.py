"""Typed events of a run, and the sinks that log, show or plot them."""
