"""The Gluon backend for GPUs of compute capability 9."""
