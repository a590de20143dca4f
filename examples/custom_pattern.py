"""Compose a pattern, draw it, and train with it.

python examples/custom_pattern.py
"""

import argparse

import torch

import dilated_attention_pytorch as dap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()

    local, sinks, far = dap.SlidingWindow(64), dap.Global(8), dap.Dilated((512,), (16,))
    pattern = (local | sinks | far) & dap.Causal()
    print(f"as text: {pattern}")
    plan = dap.make_plan(pattern, arguments.tokens, heads=4, block_size=32)
    print(plan)
    print(plan.picture())

    module = dap.MultiheadSparseAttention(32, 4, pattern)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    x = torch.randn(2, arguments.tokens, 32)
    target = x.roll(1, dims=1)
    for step in range(5):
        loss = (module(x)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
