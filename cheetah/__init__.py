"""Cheetah: one persistent CUDA kernel for the whole decode step of a Llama model."""

__version__ = "0.1.0"
