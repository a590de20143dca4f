"""Second derivatives, forward-mode tangents and gradients of a scale are right or refused, at every entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import dense_attention, multiplicities
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention_pytorch import (
    attention,
    attention_rows,
    attention_step,
    attention_with_lse,
    merge,
    parse,
    selected_attention,
)
from dilated_attention_pytorch.distributed import SequenceLayout, context_parallel_attention
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.models import LongNetLM
from dilated_attention_pytorch.ops.streaming.sources import TensorSource
from dilated_attention_pytorch.ops.streaming.stream import streamed_attention, streamed_gradients

N = 70
BACKENDS = ["reference", "cpu", *(["native"] if library_path().exists() else [])]
SECOND = "derivative for the backward of .* is not implemented"
FORWARD = "forward-mode AD is not implemented"
Entry = Callable[..., Tensor]
# torch's own forward_ad.make_dual uses torch.jit; backward(create_graph=True) warns of a reference cycle.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def selected(query: Tensor, key: Tensor, value: Tensor, per_token: bool = False, **options: object) -> Tensor:
    indices = torch.tensor([[0, 1]], dtype=torch.int32).expand(1, 1, N if per_token else -(-N // 16), 2)
    return selected_attention(query, key, value, indices, granularity=16, **options)


ENTRIES: dict[str, Entry] = {
    **{name: lambda *x, name=name, **o: attention(*x, "window:9", backend=name, **o) for name in BACKENDS},
    "lse": lambda *x, **o: attention_with_lse(*x, "dilated:16x1,64x2", **o).lse,
    "within a budget": lambda *x, **o: attention(*x, "window:9", memory_budget=2**30, **o),
    "causal": lambda *x, **o: attention(*x, "full", is_causal=True, **o),
    "many new tokens": lambda *x, **o: attention_step(*x, "window:9", 0, **o),
    "selected blocks": selected,
    "selected by tokens": lambda *x, **o: selected(*x, per_token=True, **o),
    "context parallel": lambda *x, **o: context_parallel_attention(
        *x, "window:9", SequenceLayout.contiguous(N, 1), **o
    ),
}
"""Entries that run kernels."""


def one_row(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    return attention_step(query[:, :, 40:41], key, value, "window:9", 40, **options)


def merged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    outputs = query @ key.mT @ value, key
    output, lse = merge(outputs, [(query * key).sum(-1), (query * value).sum(-1)])
    return output.sum(-1) * lse


COMPOSED: dict[str, Entry] = {
    "rows": lambda query, key, value, **o: attention_rows(query, key, "window:9", [3, 40], **o),
    "step": one_row,
    "merge": merged,
}
"""Entries made of torch's own operators."""


def three() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, 2, N, 8, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", ENTRIES)
def test_gradient_penalty_raises(name: str, which: int):
    tensors = three()
    tensors[which].requires_grad_()
    output = ENTRIES[name](*tensors)
    # A loss that is linear in the output: its grad_output needs no gradient.
    weight = torch.randn_like(output)
    (plain,) = torch.autograd.grad((output * weight).sum(), tensors[which], retain_graph=True)
    (grad,) = torch.autograd.grad((output * weight).sum(), tensors[which], create_graph=True)
    assert torch.equal(grad, plain)
    with pytest.raises(NotImplementedError, match=SECOND):
        torch.autograd.grad(grad.square().sum(), tensors[which], allow_unused=True, retain_graph=True)
    with pytest.raises(NotImplementedError, match=SECOND):
        (output.sum() + grad.square().sum()).backward()


@pytest.mark.parametrize("name", BACKENDS)
def test_create_graph_alone_gives_first_order_gradients(name: str):
    tensors = [x.requires_grad_() for x in three()]
    ENTRIES[name](*tensors).square().sum().backward(create_graph=True)
    found = [x.grad for x in tensors]
    output, _ = dense_attention(*tensors, multiplicities(parse("window:9"), N, 2))
    for got, want in zip(found, torch.autograd.grad(output.square().sum(), tensors), strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-12)


def test_nested_transforms_raise_and_single_ones_are_right():
    query, key, value = three()
    counts = multiplicities(parse("full"), N, 2)

    def ours(x: Tensor) -> Tensor:
        return attention(x, key, value, "full").sin().sum()

    def dense(x: Tensor) -> Tensor:
        return dense_attention(x, key, value, counts)[0].sin().sum()

    torch.testing.assert_close(torch.func.grad(ours)(query), torch.func.grad(dense)(query), rtol=0, atol=1e-12)
    for twice in (
        torch.func.grad(lambda x: torch.func.grad(ours)(x).square().sum()),
        torch.func.jacrev(torch.func.jacrev(ours)),
    ):
        with pytest.raises(NotImplementedError, match=SECOND):
            twice(query)
    outer = torch.ones((), dtype=torch.float64, requires_grad=True)
    first = torch.func.grad(lambda x: ours(x * outer))(query)
    with pytest.raises(NotImplementedError, match=SECOND):
        first.sum().backward()


def test_loss_of_a_model_has_no_silent_second_derivative():
    model = LongNetLM("tiny", num_decoder_layers=1, segment_lengths=[8], dilation_rates=[1])
    weight = next(model.parameters())
    (grad,) = torch.autograd.grad(model.loss(torch.randint(11, (1, 12))), weight, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=SECOND):
        grad.square().sum().backward()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", ENTRIES)
def test_dual_tensors_are_refused(name: str, which: int):
    tensors = list(three())
    with forward_ad.dual_level():
        # A level alone, or a tensor of an ended level, carries no tangent.
        assert ENTRIES[name](*tensors).isfinite().all()
        tensors[which] = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
        with pytest.raises(NotImplementedError, match=FORWARD):
            ENTRIES[name](*tensors)


@pytest.mark.parametrize("name", ENTRIES)
def test_dual_gradients_are_refused(name: str):
    tensors = [x.requires_grad_() for x in three()]
    output = ENTRIES[name](*tensors)
    with forward_ad.dual_level():
        slope = forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output))
        with pytest.raises(NotImplementedError, match=FORWARD):
            torch.autograd.grad(output, tensors, slope)


def test_dual_tensors_in_a_stream_are_refused():
    tensors = list(three())
    with forward_ad.dual_level():
        tensors[1] = forward_ad.make_dual(tensors[1], torch.ones_like(tensors[1]))
        with pytest.raises(NotImplementedError, match=FORWARD):
            streamed_attention(tuple(tensors), "window:9", torch.empty_like(tensors[0]), chunk=16)
        source = TensorSource(*three(), gradients=True)
        source.tensors = tuple(tensors)
        for stream in (streamed_attention, streamed_gradients):
            with pytest.raises(NotImplementedError, match=FORWARD):
                stream(source, "window:9", lambda begin, output, lse: output, chunk=16)


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_entries_have_tangents_and_second_derivatives(name: str):
    tensors = [torch.randn(1, 1, 44, 2, dtype=torch.float64).requires_grad_() for _ in range(3)]

    def some(*parts: Tensor) -> Tensor:
        # Few inputs, for gradgradcheck takes every one apart.
        whole = [
            torch.cat([x[:, :, :38].detach(), p, x[:, :, 40:].detach()], 2) for x, p in zip(tensors, parts, strict=True)
        ]
        return COMPOSED[name](*whole)

    parts = [x[:, :, 38:40].detach().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(some, parts, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(some, parts)


@pytest.mark.untyped
@pytest.mark.parametrize("name", [*ENTRIES, *(name for name in COMPOSED if name != "merge")])
def test_scale_that_needs_a_gradient_is_refused(name: str):
    entry = (ENTRIES | COMPOSED)[name]
    tensors = three()
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(TypeError, match="scale must be a number, got a tensor that requires a gradient"):
        entry(*tensors, scale=scale)
    with torch.no_grad():
        assert torch.equal(entry(*tensors, scale=scale), entry(*tensors, scale=0.3))
    with pytest.raises(ValueError, match="scale must be finite"):
        entry(*tensors, scale=float("inf"))


@pytest.mark.untyped
def test_scale_of_a_stream_that_needs_a_gradient_is_refused():
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(TypeError, match="scale must be a number"):
        streamed_attention(three(), "window:9", torch.empty(1, 2, N, 8), scale=scale)
