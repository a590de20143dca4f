"""Train attention that selects its keys: each block holds a key and a value, and retrieves the value of an earlier one.

Every token keeps 4 of 16 blocks. A window of 4 blocks holds half of the answers; the scorer must find the others.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

from dilated_attention_pytorch.models import save_adaptive, write_state
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive

BLOCKS, SIZE, NAMES = 16, 16, 64


def draw(batch):
    """Tokens (batch, 256), and the target value of each, -100 where there is none."""
    row, block = torch.arange(batch)[:, None], torch.arange(BLOCKS)
    keys, values = torch.rand(batch, NAMES).argsort(1)[:, :BLOCKS], torch.randint(NAMES, 2 * NAMES, (batch, BLOCKS))
    tokens = torch.randint(2 * NAMES, 3 * NAMES, (batch, BLOCKS, SIZE))
    told, question = torch.randint(SIZE // 2 - 1, (batch, BLOCKS)), torch.randint(SIZE // 2, SIZE, (batch, BLOCKS))
    tokens[row, block, told], tokens[row, block, told + 1] = keys, values
    asked = (torch.rand(batch, BLOCKS) * block).long()
    tokens[row, block, question] = keys.gather(1, asked)
    answers = torch.full_like(tokens, -100)
    answers[row, block[1:], question[:, 1:]] = values.gather(1, asked)[:, 1:]
    return tokens.flatten(1), answers.flatten(1)


class Reader(nn.Module):
    """One layer: a token asks, the token before a value is its key, the value is the answer."""

    def __init__(self, attend, width=64):
        super().__init__()
        self.embed, self.attend = nn.Embedding(3 * NAMES, width), attend
        self.ask, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        for same in (self.ask, self.key, self.value):
            nn.init.eye_(same.weight)

    def heads(self, tokens):
        x = F.normalize(self.embed(tokens), dim=-1) * 8
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return [f(h)[:, :, None] for f, h in ((self.ask, x), (self.key, before), (self.value, x))]

    def forward(self, tokens):
        found = self.attend(*self.heads(tokens), is_causal=True)
        return F.linear(found[:, :, 0], F.normalize(self.embed.weight, dim=-1))


def train(model, steps, batch=32):
    """Yield (step, accuracy on fresh sequences) as training goes on."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps + 1):
        if step % 50 == 0 or step == steps:
            tokens, answers = draw(128)
            right = model.eval()(tokens).argmax(-1) == answers
            yield step, right[answers >= 0].double().mean().item()
        tokens, answers = draw(batch)
        optimizer.zero_grad()
        F.cross_entropy(model.train()(tokens).transpose(1, 2), answers).backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save", help="folder for reader.pt and input.pt, which dap show --learned draws")
    given, began = parser.parse_args(), time.perf_counter()
    config = AdaptiveConfig(base_sparsity=0.75, k_min=4, k_max=4, local_blocks=1, sink_blocks=0, score_unit=2)
    model = Reader(BlockSparseAdaptive([256], [1], 1, 64, config, block_size=SIZE))
    for step, right in train(model, given.steps):
        print(f"step {step:4d}  accuracy {right:.3f}  {time.perf_counter() - began:4.0f} s", flush=True)
    print(model.eval().attend(*(heads := model.heads(draw(1)[0])), is_causal=True, return_pattern=True)[1].picture())
    if given.save:
        save_adaptive(model, f"{given.save}/reader.pt", is_causal=True)
        write_state(dict(zip(("query", "key"), heads, strict=False)), f"{given.save}/input.pt")
