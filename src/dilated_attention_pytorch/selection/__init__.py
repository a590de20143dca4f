"""Attention on chosen blocks: rank, attend, distill."""
