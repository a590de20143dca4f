"""Attention over sequences that do not fit in memory."""
