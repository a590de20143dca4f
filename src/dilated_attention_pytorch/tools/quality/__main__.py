"""`python -m dilated_attention_pytorch.tools.quality`."""

from ..console import leave
from .runner import main

if __name__ == "__main__":
    leave(main)
