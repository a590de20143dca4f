"""Read a prompt, then decode token by token with a cache that drops keys no later token attends to.

python examples/decode.py --prompt 500 --steps 1000
"""

import argparse

import torch

import dilated_attention_pytorch as dap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()

    module = dap.MultiheadDilatedAttention(64, 4, [64, 256], [1, 4], num_kv_heads=2, position="rotary").eval()
    x = torch.randn(1, arguments.prompt + arguments.steps, 64)
    cache = module.cache()
    with torch.no_grad():
        rows = [module(x[:, : arguments.prompt], is_causal=True, cache=cache)[0]]
        for t in range(arguments.prompt, x.shape[1]):
            rows.append(module(x[:, t : t + 1], is_causal=True, cache=cache)[0])
            if t % 100 == 0:
                print(f"token {t:>5}: the cache holds {cache.tokens:>4} positions, {cache.nbytes / 1024:.0f} KiB")
        whole = module(x, is_causal=True)[0]
    difference = (torch.cat(rows, 1) - whole).abs().max().item()
    print(f"largest difference from the whole computation: {difference:.1e}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
