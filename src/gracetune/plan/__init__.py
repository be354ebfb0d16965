"""The planner: predicts a run's memory and time, finds the fastest plan, applies and corrects it."""
