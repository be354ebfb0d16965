"""The training run: objective, step, loop, state, checkpoint, validation."""
