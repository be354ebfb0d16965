"""Run SimpleTuner's train.py without a GPU: it pins every latent, which needs a CUDA driver."""

import runpy
import sys
from importlib.metadata import distribution

import torch

torch.Tensor.pin_memory = lambda self, *args, **options: self
script = str(distribution("simpletuner").locate_file("simpletuner/train.py"))
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
