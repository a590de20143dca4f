"""Launching Triton and Gluon kernels with little host time."""
