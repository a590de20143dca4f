"""Triton and Gluon kernels of attention on chosen blocks."""
