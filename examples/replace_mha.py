"""Replace the attention of a torch transformer and keep its weights.

python examples/replace_mha.py --tokens 4096
"""

import argparse
import time
import warnings

import torch
from torch import nn

import dilated_attention_pytorch as dap


def seconds(model: nn.Module, x: torch.Tensor) -> float:
    model(x)
    start = time.perf_counter()
    model(x)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pattern", default="window:128 | global:16")
    arguments = parser.parse_args()

    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    with warnings.catch_warnings():
        # torch says that it turns its nested tensors off for replaced attention.
        warnings.simplefilter("ignore")
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(1, arguments.tokens, 128)
    with torch.no_grad():
        before = seconds(model, x)
        for entry in dap.replace_attention(model, arguments.pattern):
            print(f"{entry.name}: {entry.why}")
        after = seconds(model, x)
    print(model.layers[0].self_attn.explain(arguments.tokens))
    print(f"whole model, {arguments.tokens} tokens: {before:.3f} s dense, {after:.3f} s sparse")


if __name__ == "__main__":
    main()
