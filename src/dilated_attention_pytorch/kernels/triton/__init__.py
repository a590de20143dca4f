"""The portable Triton backend."""

PACKAGE = "triton"
"""Distribution that the GPU kernels are compiled with."""
