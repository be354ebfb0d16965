"""Adapter layers at run time: fused LoRA matmuls, LyCORIS modules, frozen fp8 weights."""
