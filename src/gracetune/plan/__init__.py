"""The planner: predicts memory and time of a run, finds the fastest plan and applies it."""
