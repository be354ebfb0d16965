"""What moves between host and device during a step: frozen weights and activations."""
