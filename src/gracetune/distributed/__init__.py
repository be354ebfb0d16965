"""Training on several GPUs and machines: ranks that exchange gradients, decisions and errors."""
