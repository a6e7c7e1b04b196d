"""Calibrated quantization of whole model folders; see `quantize`."""

from qerl_jax.quantization.quantize import quantize_folder

__all__ = ["quantize_folder"]
