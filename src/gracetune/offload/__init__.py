"""Keep weights and activations in host memory, and copy them to the device for each step."""
