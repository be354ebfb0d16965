"""Training. To follow a run, read `run.py`, `loop.py`, `step.py`, `objective.py` in this order."""
