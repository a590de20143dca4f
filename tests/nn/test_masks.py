"""Masks, weights and empty inputs against `torch.nn.MultiheadAttention` in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dense_attention, error, multiplicities
from torch import nn

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import MultiheadSparseAttention, SparseAttention

DOUBLE = {"dtype": torch.float64}
EXTRA_KEYS = ({"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True})
KINDS = ("bool", "-inf", "-1e9", "finite", "learned")


def mask_of(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask of a kind; every query sees its first key."""
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    if kind == "bool":
        return hidden
    if kind in ("finite", "learned"):
        return torch.randn(shape, **DOUBLE).masked_fill_(hidden, -torch.inf).requires_grad_(kind == "learned")
    return torch.zeros(shape, **DOUBLE).masked_fill_(hidden, float(kind))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, object]:
    return {
        "lengths": draw(st.sampled_from([(20, 20), (1, 1), (7, 20), (20, 7)])),
        "kind": draw(st.sampled_from([None, *KINDS])),
        "by_sample": draw(st.booleans()),
        "padding": draw(st.sampled_from([None, "bool", "-inf", "-1e9"])),
        "average": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "batched": draw(st.booleans()),
        "extra": draw(st.sampled_from([{}, *EXTRA_KEYS])),
        "seed": draw(st.integers(0, 1000)),
    }


@given(calls())
@settings(max_examples=60, deadline=None)
def test_outputs_weights_and_gradients_match_torch(call: dict):
    torch.manual_seed(call["seed"])
    (n, keys), batch, heads = call["lengths"], 2 if call["batched"] else 1, 2
    mha = nn.MultiheadAttention(8, heads, batch_first=call["batch_first"], **call["extra"], **DOUBLE)
    nn.init.normal_(mha.in_proj_bias)
    module = MultiheadSparseAttention.from_torch(mha, "full")
    q, k = (torch.randn(batch, size, 8, **DOUBLE, requires_grad=True) for size in (n, keys))
    if not call["batched"]:
        given = q[0], k[0], k[0]
    else:
        given = (q, k, k) if call["batch_first"] else tuple(x.transpose(0, 1) for x in (q, k, k))
    options = {"need_weights": True, "average_attn_weights": call["average"]}
    leaves = [q, k]
    if call["kind"] is not None:
        shape = (batch * heads, n, keys) if call["by_sample"] else (n, keys)
        options["attn_mask"] = mask_of(call["kind"], shape)
        leaves += [options["attn_mask"]] * (call["kind"] == "learned")
    if call["padding"] is not None:
        hidden = torch.arange(keys) >= torch.tensor([keys, max(1, keys // 2)])[:batch, None]
        if call["padding"] != "bool":
            hidden = torch.zeros(batch, keys, **DOUBLE).masked_fill_(hidden, float(call["padding"]))
        elif call["kind"] not in (None, "bool"):
            # torch warns about masks of two dtypes.
            hidden = torch.zeros(batch, keys, **DOUBLE).masked_fill_(hidden, -torch.inf)
        if hidden.dtype != torch.bool and call["kind"] == "bool":
            options["attn_mask"] = torch.zeros(shape, **DOUBLE).masked_fill_(options["attn_mask"], -torch.inf)
        options["key_padding_mask"] = hidden if call["batched"] else hidden[0]
    found, wanted = module(*given, **options), mha(*given, **options)
    assert found[0].shape == wanted[0].shape and found[1].shape == wanted[1].shape
    assert error(found[0], wanted[0].detach()) < 1e-10
    assert error(found[1], wanted[1].detach()) < 1e-10
    losses = [(out * out).sum() + (weights * weights).sum() for out, weights in (found, wanted)]
    extra = [[m.bias_k, m.bias_v] if "add_bias_kv" in call["extra"] else [] for m in (module, mha)]
    grads = [torch.autograd.grad(loss, leaves + own) for loss, own in zip(losses, extra, strict=True)]
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-9


@pytest.mark.parametrize("make", EXTRA_KEYS)
@pytest.mark.parametrize("lengths", [(30, 30), (12, 30)])
def test_every_row_sees_the_extra_keys(make, lengths):
    # Some rows of every head see no key of the pattern: only the extra ones are left.
    module = MultiheadSparseAttention(16, 4, "dilated:30x3", position="rotary" if lengths[0] == 30 else None, num_kv_heads=2, **make, **DOUBLE)  # fmt: skip
    q, k = (torch.randn(2, n, 16, **DOUBLE, requires_grad=True) for n in lengths)
    padding = torch.arange(30).expand(2, -1) % 3 == 2
    output, weights = module(q, k, key_padding_mask=padding, need_weights=True, average_attn_weights=False)
    v = module.v_proj(k).unflatten(-1, (-1, 4)).transpose(1, 2).repeat_interleave(2, 1)
    extra = torch.zeros(2, 4, len(make), 4, **DOUBLE)
    if module.bias_v is not None:
        extra[:, :, 0] = module.bias_v.view(2, 4).repeat_interleave(2, 0)
    wanted = module.out_proj((weights @ torch.cat([v, extra], 2)).transpose(1, 2).flatten(2))
    assert error(output, wanted.detach()) < 1e-10 and error(weights.sum(-1), torch.ones(2, 4, lengths[0])) < 1e-10
    leaves = [q, k, *module.parameters()][: 2 if module.bias_k is None else None]
    grads = [torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for out in (output, wanted)]
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-9


def test_extra_keys_have_no_position():
    """A query and the key of its own token have one rotation, which the score of an extra key must not have."""
    plain, rotary = (
        dap.MultiheadSparseAttention(16, 2, "full", add_bias_kv=True, position=p) for p in (None, "rotary")
    )
    rotary.load_state_dict(plain.state_dict())
    x, found = torch.randn(1, 9, 16), []
    for module in (plain, rotary):
        weights = module(x, need_weights=True, average_attn_weights=False)[1].log()
        found.append(weights[..., 9] - weights[..., :9].diagonal(dim1=-2, dim2=-1))
    assert torch.allclose(*found, atol=1e-5)


def test_extra_keys_are_dropped_like_the_others():
    torch.manual_seed(0)
    module = MultiheadSparseAttention(8, 1, "window:2", dropout=0.5, add_bias_kv=True, bias=False, **DOUBLE)
    x = torch.randn(1, 6, 8, **DOUBLE)
    exact = module.eval()(x)[0].detach()
    drawn = torch.stack([module.train()(x)[0].detach() for _ in range(4000)])
    assert error(drawn.mean(0), exact) < 0.06
    module.out_proj.weight.data, module.v_proj.weight.data = torch.eye(8, **DOUBLE), torch.zeros(8, 8, **DOUBLE)
    alone = torch.stack([module(x)[0][0, 0, 0].detach() for _ in range(2000)])
    assert abs((alone == 0).double().mean() - 0.5) < 0.05


def test_extra_keys_round_trip_and_refusals():
    mha = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    mha.bias_v.requires_grad_(False)
    module = dap.MultiheadDilatedAttention.from_torch(mha, [16], [1])
    assert module.bias_k.requires_grad and not module.bias_v.requires_grad
    assert "add_bias_kv=True, add_zero_attn=True" in repr(module)
    back = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True)
    back.load_state_dict(module.torch_state_dict())
    assert torch.equal(back.bias_k, mha.bias_k)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    assert module.bias_k.std() > 0.1 and module.bias_v.std() > 0.1
    x = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="cache must come without add_bias_kv"):
        module(x, cache=module.cache(), is_causal=True)
    with pytest.raises(ValueError, match="sink must come without"):
        MultiheadSparseAttention(8, 2, "full", sink=True, add_zero_attn=True)
    with pytest.raises(ValueError, match="learned attention must come without add_bias_kv"):
        dap.MultiheadBlockSparseAdaptive.from_torch(mha, [16], [1])


@pytest.mark.parametrize("pattern", ["window:5", "dilated:8x1,32x4", "heads{window:3 / full}"])
@pytest.mark.parametrize("lengths", [(30, 30), (12, 30)])
def test_bias_is_added_inside_the_pattern(pattern, lengths):
    module = MultiheadSparseAttention(16, 2, pattern, **DOUBLE, num_kv_heads=1)
    q, k = (torch.randn(2, n, 16, **DOUBLE, requires_grad=True) for n in lengths)
    bias = torch.randn(4, *lengths, **DOUBLE)
    heads = [p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p, x in zip((module.q_proj, module.k_proj, module.v_proj), (q, k, k), strict=True)]  # fmt: skip
    counts = multiplicities(dap.parse(pattern), max(lengths), 2)[:, : lengths[0], : lengths[1]]
    wanted = dense_attention(*heads, counts * bias.unflatten(0, (2, 2)).exp())[0]
    wanted = module.out_proj(wanted.transpose(1, 2).flatten(2))
    found = module(q, k, attn_mask=bias)[0]
    assert error(found, wanted.detach()) < 1e-10
    grads = [torch.autograd.grad(out.square().sum(), (q, k)) for out in (found, wanted)]
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-9


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 0), (2, 0, 5), (0, 0, 0), (2, 3, 0)])
@pytest.mark.parametrize(
    "options", [{}, {"need_weights": True}, {"masked": True}, {"masked": True, "need_weights": True}]
)
def test_empty_inputs_keep_shapes_and_graph(shape, options):
    batch, n, keys = shape
    module = MultiheadSparseAttention(8, 2, "window:3")
    q, k = torch.randn(batch, n, 8, requires_grad=True), torch.randn(batch, keys, 8, requires_grad=True)
    mask = torch.zeros(n, keys) if options.get("masked") else None
    output, weights = module(q, k, k, attn_mask=mask, need_weights=options.get("need_weights", False))
    assert output.shape == (batch, n, 8)
    assert weights is None or weights.shape == (batch, n, keys)
    output.sum().backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.zeros(20, 19)}, "must have shape"),
        ({"attn_mask": torch.zeros(20, 20, dtype=torch.int64)}, "bool"),
        ({"attn_mask": torch.randn(20, 20), "is_causal": True}, "0, and -inf or at most -10000"),
        ({"attn_mask": torch.randn(20, 20), "cu_seqlens": torch.tensor([0, 20])}, "whole sequences, got cu_seqlens"),
    ],
)
@pytest.mark.untyped
def test_masks_without_a_meaning_are_refused(options, message):
    x = torch.randn(1 if "cu_seqlens" in options else 2, 20, 32)
    with pytest.raises((ValueError, TypeError), match=message):
        MultiheadSparseAttention(32, 4, "window:3")(x, x, x, **options)


def test_core_modules_return_their_weights():
    attention = SparseAttention("dilated:8x1,32x4").double()
    q, k, v = torch.randn(3, 2, 30, 4, 8, **DOUBLE).unbind()
    output, weights = attention(q, k, v, is_causal=True, return_attention_weights=True)
    assert weights.shape == (2, 4, 30, 30)
    assert error((weights @ v.transpose(1, 2)).transpose(1, 2), output) < 1e-10
    with pytest.raises(ValueError, match="attention_rows"):
        attention(*torch.zeros(3, 1, 8193, 1, 2, **DOUBLE).unbind(), return_attention_weights=True)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["bool", "-1e9", "finite", None])
@pytest.mark.parametrize("lengths", [(24, 24), (9, 24)])
@pytest.mark.parametrize("make", [{}, EXTRA_KEYS[-1]])
def test_masks_and_weights_compile_whole(kind, lengths, make):
    torch._dynamo.reset()
    module = MultiheadSparseAttention(16, 2, "dilated:8x1,32x4", **DOUBLE, **make)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    q, k = (torch.randn(2, n, 16, **DOUBLE, requires_grad=True) for n in lengths)
    mask = None if kind is None else mask_of(kind, (4, *lengths))
    (found, weights), (wanted, own) = (f(q, k, k, attn_mask=mask, need_weights=True) for f in (compiled, module))
    assert error(found, wanted.detach()) < 1e-10 and error(weights, own.detach()) < 1e-10
    grads = [torch.autograd.grad(out.square().sum(), (q, k)) for out in (found, wanted)]
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-9


def test_modules_with_masks_run_on_the_meta_device():
    with torch.device("meta"):
        module, x = MultiheadSparseAttention(16, 2, "window:4"), torch.empty(2, 9, 16)
        masks = torch.empty(9, 9, dtype=torch.bool), torch.empty(9, 9)
        assert all(module(x, x, x, attn_mask=mask)[0].shape == x.shape for mask in masks)
