"""`python -m dilated_attention_pytorch.tools.quality`."""

from ..console import leave
from .command import main

if __name__ == "__main__":
    leave(main)
