"""`python -m dilated_attention_pytorch` is the command `dap`."""

from .tools.cli import main

if __name__ == "__main__":
    main()
