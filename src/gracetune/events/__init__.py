"""What a run tells: typed events, and the sinks that log, show or plot them."""
