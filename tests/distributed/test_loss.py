"""The loss of a spread sequence, and training with it: one process's numbers, however unequal the ranks' tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import error
from processes import all_pass
from torch import nn
from torch.nn import functional as F

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.distributed import SequenceLayout, shard_sequence
from dilated_attention_pytorch.distributed.gradient_compression import GradientBuckets
from dilated_attention_pytorch.distributed.loss import IGNORED, context_parallel_loss, next_token_labels
from dilated_attention_pytorch.models import LongNetLM, SlideEncoder
from dilated_attention_pytorch.nn import set_process_group

N, WORDS, STEPS = 60, 11, 20
LAYOUT = SequenceLayout.of_lengths([30, 3, 0, 27])


class Model(nn.Module):
    """A language model of one layer."""

    def __init__(self, layout: str | SequenceLayout = "contiguous") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 16)
        self.attention = dap.RingMultiheadDilatedAttention(16, 2, [8, 32], [1, 2], position="rotary", layout=layout)
        self.head = nn.Linear(16, WORDS)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        return self.head(x + self.attention(x, is_causal=True)[0])


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, N), generator=torch.Generator().manual_seed(step))


def labels_of(tokens: torch.Tensor) -> torch.Tensor:
    """The next tokens, where the first 25 of a sample take no part: ranks hold unequal numbers."""
    labels = next_token_labels(tokens, SequenceLayout.contiguous(N, 1), 0)
    labels[0, :25] = IGNORED
    return labels


def in_one_process() -> tuple[list[float], list[torch.Tensor]]:
    model, losses = Model(), []
    set_process_group(model, None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        tokens = tokens_of(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels_of(tokens).flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def train(rank: int, layout: SequenceLayout, group, samples: slice, wrap) -> tuple[list[float], list[torch.Tensor]]:
    model, losses = Model(layout), []
    set_process_group(model, group)
    outer, after = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        tokens = tokens_of(step)
        own, labels = (shard_sequence(x, layout, rank, 1)[samples] for x in (tokens, labels_of(tokens)))
        loss = context_parallel_loss(outer(own), labels)
        optimizer.zero_grad()
        loss.backward()
        after()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def training_is_that_of_one_process(rank: int, world: int) -> None:
    losses_and_their_gradients(rank)
    models_over_ranks(rank, world)
    losses, parameters = in_one_process()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    forms = {
        "four shards, buckets": (rank, LAYOUT, dist.group.WORLD, slice(None), by_buckets),
        "four shards, DDP": (rank, SequenceLayout.zigzag(N, world), dist.group.WORLD, slice(None), by_ddp),
        "two samples x two shards": (
            rank % 2,
            SequenceLayout.of_lengths([50, 10]),
            mesh["cp"].get_group(),
            slice(rank // 2, rank // 2 + 1),
            by_buckets,
        ),
    }
    for name, form in forms.items():
        found = train(*form)
        assert max(abs(a - b) for a, b in zip(found[0], losses, strict=True)) <= 1e-11, name
        for got, want in zip(found[1], parameters, strict=True):
            assert error(got, want) <= 1e-10, name


def models_over_ranks(rank: int, world: int) -> None:
    """Logits are one process's; what would silently be another number is refused."""
    size = {"d_model": 16, "nhead": 2, "dim_feedforward": 16, "segment_lengths": (8, 32), "dilation_rates": (1, 2)}
    torch.manual_seed(0)
    model = LongNetLM(num_tokens=WORDS, num_decoder_layers=1, sink=True, **size).double()
    nn.init.normal_(model.long_net.decoder.layers[0].self_attn.sink)
    tokens, layout = tokens_of(0), SequenceLayout.contiguous(N, world)
    wanted, whole = model(tokens), model.loss(tokens, reduction="sum")
    set_process_group(model, dist.group.WORLD)
    own, labels = shard_sequence(tokens, layout, rank, 1), next_token_labels(tokens, layout, rank)
    assert error(model(own), shard_sequence(wanted, layout, rank, 1)) <= 1e-12
    total = model.loss(own, labels, reduction="sum", ignore_index=IGNORED).detach()
    dist.all_reduce(total)
    assert error(total, whole) <= 1e-12
    with pytest.raises(ValueError, match="targets must be given to a model over several ranks"):
        model.loss(own)
    slides = SlideEncoder(tile_width=4, d_model=16, num_layers=1, nhead=2, segment_lengths=(8,), dilation_rates=(1,))
    set_process_group(slides, dist.group.WORLD)
    with pytest.raises(ValueError, match="a slide must lie on one rank"):
        slides(torch.randn(1, 5, 4), torch.zeros(1, 5, 2))


def by_buckets(model):
    return model, GradientBuckets(model.parameters()).synchronize


def by_ddp(model):
    return nn.parallel.DistributedDataParallel(model), lambda: None


def losses_and_their_gradients(rank: int) -> None:
    """With class weights, smoothing and a rank without a token; both ways of adding gradients up."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, N, WORDS, generator=generator, dtype=torch.float64)
    labels = labels_of(tokens_of(0))
    weight = torch.rand(WORDS, generator=generator, dtype=torch.float64)
    for options in ({}, {"weight": weight}, {"label_smoothing": 0.2}):
        whole = logits.clone().requires_grad_()
        wanted = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, **options)
        wanted.backward()
        for gradients, scale in (("mean", 4), ("sum", 1)):
            own = shard_sequence(logits, LAYOUT, rank, 1).clone().requires_grad_()
            loss = context_parallel_loss(own, shard_sequence(labels, LAYOUT, rank, 1), gradients=gradients, **options)
            loss.backward()
            assert abs(loss.item() - wanted.item()) <= 1e-14
            assert error(own.grad / scale, shard_sequence(whole.grad, LAYOUT, rank, 1)) <= 1e-15


@pytest.mark.timeout(180)
def test_twenty_steps_over_ranks_are_those_of_one_process():
    all_pass(training_is_that_of_one_process, 4, seconds=120.0)


def test_labels_cross_the_edges_of_shards():
    tokens, layout = torch.arange(10)[None], SequenceLayout.zigzag(10, 2)
    found = [next_token_labels(tokens, layout, rank)[0].tolist() for rank in range(2)]
    assert found == [[1, 2, 3, 9, IGNORED], [4, 5, 6, 7, 8]]


def test_a_batch_without_a_label_is_not_a_number_as_in_torch():
    assert context_parallel_loss(torch.randn(1, 2, 3), torch.full((1, 2), IGNORED)).isnan()


def test_an_infinite_loss_stays_infinite():
    logits = torch.tensor([[[0.0, float("-inf")]]], requires_grad=True)
    assert context_parallel_loss(logits, torch.tensor([[1]])).isinf()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.randn(1, 2, 3), torch.zeros(1, 3, dtype=torch.int64)), r"labels must have shape \(1, 2\)"),
        ((torch.randn(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64)), 'gradients must be "mean" or "sum"'),
    ],
)
def test_wrong_input_says_what_must_hold(arguments, says):
    with pytest.raises(ValueError, match=says):
        context_parallel_loss(*arguments, gradients="mean" if "labels" in says else "add")
