"""An `inner_attention` module as torchtitan's models call it, in a small transformer.

torchtitan computes attention by `self.inner_attention(q, k, v, scale=..., enable_gqa=...)` on (batch, heads, tokens,
width) tensors. This module takes that call; patterns need no mask, and nothing is built per batch.

python examples/torchtitan_attention.py --tokens 4096 --compile
"""

import argparse

import torch
from torch import nn

import dilated_attention_pytorch as dap


class PatternAttention(nn.Module):
    """Replacement of torchtitan's `ScaledDotProductAttentionWrapper`."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = dap.parse(pattern)

    def forward(self, q, k, v, *, scale=None, enable_gqa=False, is_causal=True, **_):
        return dap.attention(q, k, v, self.pattern, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


class Attention(nn.Module):
    """Attention as torchtitan's Llama has it, without rotary positions."""

    def __init__(self, dim: int, heads: int, kv_heads: int, inner_attention: nn.Module) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(dim, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.inner_attention = inner_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xq, xk, xv = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        output = self.inner_attention(xq, xk, xv, enable_gqa=xq.shape[1] > xk.shape[1])
        return self.wo(output.transpose(1, 2).flatten(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pattern", default="dilated:512x1,2048x4")
    parser.add_argument("--compile", action="store_true")
    told = parser.parse_args()
    torch.manual_seed(0)
    words = nn.Embedding(64, 128)
    blocks = nn.ModuleList(Attention(128, 4, 2, PatternAttention(told.pattern)) for _ in range(2))
    head = nn.Linear(128, 64)
    model = nn.ModuleList([words, blocks, head])

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        x = words(tokens[:, :-1])
        for block in blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(head(x).flatten(0, 1), tokens[:, 1:].flatten())

    step = torch.compile(loss_of, fullgraph=True) if told.compile else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(told.steps):
        loss = step(torch.arange(told.tokens + 1)[None] % 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
