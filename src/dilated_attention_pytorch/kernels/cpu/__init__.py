"""Backends for CPU tensors: torch tiles and a C++ library."""
