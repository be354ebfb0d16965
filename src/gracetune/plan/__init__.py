"""Before a run: how many bytes it takes, how long it lasts, and what to keep where."""
