"""Set variables that torch reads when it is imported, or when CUDA starts: import this first."""

import os

from gracetune.config.environment import prefer_expandable_segments

prefer_expandable_segments()
# Without it, `torch.cuda.is_available` initializes CUDA, which a forked process cannot use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # for NumPy: a process with threads is not forked
