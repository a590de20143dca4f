"""Multihead modules: the operation between projections, called as torch's own module is."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import dense_attention, error, multiplicities
from torch import nn

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.nn import (
    Alibi,
    BlockSparseRingMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
    RingMultiheadDilatedAttention,
    Rotary,
    SparseAttention,
    SparsePatternConfig,
    Xpos,
)

DOUBLE = {"dtype": torch.float64}
MODULES = {
    "any": lambda **k: MultiheadSparseAttention(32, 4, "window:9", **k),
    "dilated": lambda **k: MultiheadDilatedAttention(32, 4, [16, 64], [1, 4], **k),
    "ring": lambda **k: RingMultiheadDilatedAttention(32, 4, [16, 64], [1, 4], **k),
    "block": lambda **k: BlockSparseRingMultiheadDilatedAttention(
        32, 4, [64], [1], sparse_config=SparsePatternConfig(sparsity_ratio=0.3, block_size=16), **k
    ),
    "block-ratio": lambda **k: BlockSparseRingMultiheadDilatedAttention(
        32, 4, [64], [1], sparsity_ratio=0.3, block_size=16, **k
    ),
}


@pytest.fixture(params=MODULES)
def make(request):
    return MODULES[request.param]


def by_hand(module, x, is_causal=False, key_padding_mask=None, position=None):
    """The module in words: project, attend densely by the pattern, normalise, project."""
    pattern = module.pattern & dap.Causal() if is_causal else module.pattern
    counts = multiplicities(pattern, x.shape[1], module.num_heads)
    q, k, v = (
        p(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    if position is not None:
        q, k = position(q, k)
    found, _ = dense_attention(q, k, v, counts, scale=module.head_dim**-0.5, key_padding_mask=key_padding_mask)
    found = found.transpose(1, 2).flatten(2)
    return module.out_proj(found if module.norm is None else module.norm(found))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"bias": False}], ids=["plain", "grouped", "unbiased"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_every_gradient_are_those_of_dense_attention(make, options, is_causal):
    module = make(**DOUBLE, **options)
    x = torch.randn(2, 75, 32, **DOUBLE, requires_grad=True)
    names, parameters = zip(*module.named_parameters(), strict=True)
    output, weights = module(x, is_causal=is_causal)
    wanted = by_hand(module, x, is_causal)
    assert weights is None
    assert error(output, wanted) < 1e-10
    grad_output = torch.randn_like(output)
    found, expected = (torch.autograd.grad(out, (x, *parameters), grad_output) for out in (output, wanted))
    for name, got, want in zip(("x", *names), found, expected, strict=True):
        assert error(got, want) < 1e-9, name
        # A key bias moves every score of a row alike, and a softmax does not see it.
        assert name == "k_proj.bias" or got.abs().max() > 1e-6, name


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_is_ignored(make, kind):
    module = make(**DOUBLE)
    x = torch.randn(2, 75, 32, **DOUBLE)
    padding = torch.arange(75) >= torch.tensor([75, 30])[:, None]
    given = padding if kind == "bool" else torch.zeros(2, 75).masked_fill(padding, float("-inf"))
    output, _ = module(x, x, x, key_padding_mask=given)
    assert error(output, by_hand(module, x, key_padding_mask=padding)) < 1e-10
    moved = x.clone()
    moved[1, 30:] += 1.0
    assert torch.equal(module(moved, moved, moved, key_padding_mask=given)[0][1, :30], output[1, :30])


def test_batch_first_both_ways_and_no_batch(make):
    torch.manual_seed(0)
    first = make(**DOUBLE)
    second = make(**DOUBLE, batch_first=False)
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 40, 32, **DOUBLE)
    output = first(x)[0]
    assert error(second(x.transpose(0, 1))[0].transpose(0, 1), output) < 1e-12
    assert error(first(x[0])[0], output[0]) < 1e-12


def test_weights_multiply_values_to_the_output():
    module = MultiheadSparseAttention(32, 4, "dilated:16x1,64x4", **DOUBLE, num_kv_heads=2)
    x = torch.randn(2, 50, 32, **DOUBLE)
    padding = torch.arange(50) >= torch.tensor([50, 20])[:, None]
    output, weights = module(
        x, x, x, key_padding_mask=padding, need_weights=True, average_attn_weights=False, is_causal=True
    )
    value = module.v_proj(x).unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, 1)
    assert weights.shape == (2, 4, 50, 50)
    assert error(module.out_proj((weights @ value).transpose(1, 2).flatten(2)), output) < 1e-10
    mean = module(x, x, x, key_padding_mask=padding, need_weights=True, is_causal=True)[1]
    assert error(mean, weights.mean(1)) < 1e-12


def test_weights_have_a_longest_length(monkeypatch):
    monkeypatch.setattr("dilated_attention_pytorch.nn.attention.LONGEST_WEIGHTS", 8)
    with pytest.raises(ValueError, match="attention_rows"):
        MultiheadSparseAttention(8, 1, "window:1")(torch.randn(1, 9, 8), need_weights=True)


MASKS = {
    "window": lambda n: (torch.arange(n)[:, None] - torch.arange(n)).abs() > 5,
    "none": lambda n: torch.zeros(n, n, dtype=torch.bool),
    "causal": lambda n: torch.ones(n, n, dtype=torch.bool).triu(1),
    "scattered": lambda n: torch.rand(n, n) < 0.4,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", ["bool", "float", "each-head"])
def test_a_dense_mask_is_that_of_torch(mask, shape):
    mha = nn.MultiheadAttention(16, 2, batch_first=True, **DOUBLE)
    module = MultiheadSparseAttention.from_torch(mha, "full")
    x = torch.randn(2, 40, 16, **DOUBLE)
    ignore = MASKS[mask](40).fill_diagonal_(False)
    if shape == "float":
        ignore = torch.zeros(40, 40, **DOUBLE).masked_fill(ignore, float("-inf"))
    elif shape == "each-head":
        ignore = torch.stack([ignore, MASKS["scattered"](40).fill_diagonal_(False)]).repeat(2, 1, 1)
    assert error(module(x, x, x, attn_mask=ignore)[0], mha(x, x, x, attn_mask=ignore)[0]) < 1e-10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.zeros(20, 19)}, "must have shape"),
        ({"attn_mask": torch.rand(20, 20) < 0.5, "is_causal": True}, "must be the causal mask"),
        ({"attn_mask": torch.zeros(20, 20, dtype=torch.int64)}, "bool"),
        ({"attn_mask": True}, "attn_mask must be a Tensor, got bool"),
        ({"key_padding_mask": True}, "key_padding_mask must be a Tensor, got bool"),
        ({"key_padding_mask": torch.full((1, 20), 0.5)}, r"must have shape \(2, 20\)"),
        ({"key_padding_mask": torch.zeros(2, 19, dtype=torch.bool)}, "must have shape"),
        ({"unknown": 1}, "unexpected keyword"),
    ],
)
@pytest.mark.untyped
def test_a_mask_that_cannot_be_said_raises(options, message):
    x = torch.randn(2, 20, 32)
    with pytest.raises((ValueError, TypeError), match=message):
        MODULES["any"]()(x, x, x, **options)


def test_a_long_dense_mask_raises_and_names_what_to_use():
    module = MultiheadSparseAttention(8, 1, "window:1")
    with pytest.raises(ValueError, match="Write it as a pattern"):
        module(torch.randn(1, 4097, 8), attn_mask=torch.zeros(4097, 4097, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.parametrize("mask", [None, "bool", "float", "sample"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_finite_padding_mask_is_added_as_in_torch(mask, need_weights, extra):
    mha = nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=extra, **DOUBLE)
    module = MultiheadSparseAttention.from_torch(mha, "full")
    x, keys = torch.randn(3, 7, 16, **DOUBLE), torch.randn(3, 20, 16, **DOUBLE)
    padding = torch.randn(3, 20, **DOUBLE)
    padding[0, 5:], padding[1, :3] = -torch.inf, -1e9
    masks = {"bool": torch.rand(7, 20) < 0.3, "float": torch.randn(7, 20, **DOUBLE)}
    masks["sample"] = torch.randn(6, 7, 20, **DOUBLE)
    given = {"key_padding_mask": padding.requires_grad_(), "attn_mask": masks.get(mask), "need_weights": need_weights}
    found, wanted = module(x, keys, keys, **given), mha(x, keys, keys, **given)
    assert error(found[0], wanted[0]) < 1e-10
    assert found[1] is wanted[1] is None or error(found[1], wanted[1]) < 1e-10
    grads = [torch.autograd.grad(output.square().sum(), padding)[0] for output, _ in (found, wanted)]
    assert error(*grads) < 1e-10


def test_finite_padding_mask_keeps_the_pattern():
    module = MultiheadSparseAttention(16, 2, "window:3", **DOUBLE)
    x, padding = torch.randn(2, 20, 16, **DOUBLE), torch.randn(2, 20, **DOUBLE)
    bias = padding[:, None, None].expand(2, 2, 20, 20).flatten(0, 1)
    wanted = module(x, attn_mask=bias.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf))[0]
    assert error(module(x, key_padding_mask=padding, is_causal=True)[0], wanted) < 1e-12


def test_finite_padding_mask_that_is_long_or_with_a_cache_raises():
    module = MultiheadSparseAttention(8, 1, "window:1 & causal")
    with pytest.raises(
        ValueError, match=r"other values must have shape \(1, 4096\), got \(1, 4097\)\nPass 0, and -inf"
    ):
        module(torch.randn(1, 4097, 8), key_padding_mask=torch.ones(1, 4097))
    with pytest.raises(ValueError, match="must come with whole sequences"):
        module.eval()(torch.randn(1, 5, 8), key_padding_mask=torch.ones(1, 5), cache=module.cache(), is_causal=True)


def test_cross_attention_of_two_lengths():
    mha = nn.MultiheadAttention(16, 2, batch_first=True, kdim=12, vdim=10, **DOUBLE)
    module = MultiheadSparseAttention.from_torch(mha, "full")
    q, k, v = (torch.randn(2, n, width, **DOUBLE) for n, width in ((7, 16), (20, 12), (20, 10)))
    padding = torch.arange(20) >= torch.tensor([20, 0])[:, None]
    found = module(q, k, v, key_padding_mask=padding)[0]
    assert error(found[0], mha(q, k, v, key_padding_mask=padding)[0][0]) < 1e-10
    assert error(found[1], module.out_proj.bias.expand(7, 16)) < 1e-12


@pytest.mark.parametrize("lengths", [(37, 90), (90, 37)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        "full",
        "window:9 | global:3",
        "strided:4",
        "dilated:16x1,64x4",
        "hierarchical:2x1,8x2;block=8",
        "block_dilated:64x2;block=8",
        "heads{window:5 / causal / full / global:2}",
    ],
)
def test_positions_say_what_two_lengths_mean(pattern, lengths, is_causal):
    module = MultiheadSparseAttention(32, 4, pattern, **DOUBLE, num_kv_heads=2)
    q, k = (torch.randn(2, n, 32, **DOUBLE, requires_grad=True) for n in lengths)
    padding = torch.arange(lengths[1]) >= torch.tensor([lengths[1], 30])[:, None]
    counts = multiplicities(dap.parse(pattern) & dap.Causal() if is_causal else dap.parse(pattern), max(lengths), 4)
    heads = [
        p(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        for p, x in ((module.q_proj, q), (module.k_proj, k), (module.v_proj, k))
    ]
    counts = counts[:, : lengths[0], : lengths[1]]
    wanted, _ = dense_attention(*heads, counts, key_padding_mask=padding)
    wanted = module.out_proj(wanted.transpose(1, 2).flatten(2))
    found = module(q, k, key_padding_mask=padding, is_causal=is_causal)[0]
    assert error(found, wanted.detach()) < 1e-10
    leaves = (q, k, *module.parameters())
    grad_output = torch.randn_like(found)
    grads = [torch.autograd.grad(output, leaves, grad_output) for output in (found, wanted)]
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-10
    core = SparseAttention(pattern)
    turned = [t.transpose(1, 2) for t in heads]
    alike = core(*turned, is_causal=is_causal, key_padding_mask=padding)
    assert error(alike, dense_attention(*heads, counts, key_padding_mask=padding)[0].transpose(1, 2).detach()) < 1e-10


@pytest.mark.parametrize(
    "pattern", ["random:0.3;block=8", "block_dilated:64x1;sparsity_ratio=0.3;block=8", "blocks:0,0 1;block=64"]
)
def test_a_pattern_of_one_length_says_so(pattern):
    module = MultiheadSparseAttention(16, 2, pattern)
    with pytest.raises(ValueError, match="same length unless the pattern is defined by positions"):
        module(torch.randn(1, 70, 16), torch.randn(1, 100, 16))


def test_one_product_projects_what_is_one_tensor(make, monkeypatch):
    module = make(**DOUBLE, num_kv_heads=2)
    x = torch.randn(2, 40, 32, **DOUBLE, requires_grad=True)
    called = []
    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda own, given: called.append(own) or plain(own, given))
    results = []
    module(x[:, :2])
    assert len(called) == 4
    for given, calls in (((x, x, x), 1), ((x, x.view_as(x), x), 4)):
        called.clear()
        output = module(*given, is_causal=True)[0]
        assert len(called) == calls
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), (x, *module.parameters()))])
    assert max(error(a, b) for a, b in zip(*results, strict=True)) < 1e-12


def test_a_projection_with_more_to_it_is_called():
    module = MultiheadSparseAttention(16, 2, "window:4")
    x = torch.randn(1, 20, 16)
    before = module(x)[0]
    module.v_proj.register_forward_hook(lambda own, given, found: 2 * found)
    module.out_proj.bias.data.zero_()
    assert error(module(x)[0], 2 * before.detach()) < 1e-6
    module.k_proj = nn.Sequential(module.k_proj)
    assert error(module(x)[0], 2 * before.detach()) < 1e-6
    module.v_proj.forward = lambda given: torch.zeros_like(given)
    assert module(x)[0].abs().max() == 0


def test_packed_sequences_start_their_positions_anew():
    module = MultiheadDilatedAttention(32, 4, [16, 64], [1, 4], position="rotary", **DOUBLE)
    x = torch.randn(1, 90, 32, **DOUBLE)
    output = module(x, is_causal=True, cu_seqlens=torch.tensor([0, 37, 90]))[0]
    pieces = [module(x[:, a:b], is_causal=True)[0] for a, b in ((0, 37), (37, 90))]
    assert error(output, torch.cat(pieces, 1)) < 1e-10


def turned_by_hand(q, k, fade=None):
    """Rotary positions as complex numbers."""
    n, width = q.shape[-2:]
    half = torch.arange(width // 2).double()
    angle = torch.arange(n)[:, None] * 10000.0 ** (-2 * half / width)
    rate = torch.ones(width // 2).double() if fade is None else (2 * half + 0.4 * width) / (1.4 * width)
    power = torch.arange(n)[:, None] / 512.0

    def turn(t, sign):
        z = torch.complex(t[..., : width // 2], t[..., width // 2 :]) * torch.polar(rate ** (sign * power), angle)
        return torch.cat([z.real, z.imag], -1)

    return turn(q, 1), turn(k, -1)


@pytest.mark.parametrize("name", ["rotary", "xpos"])
def test_rotary_positions(name):
    module = MultiheadSparseAttention(32, 4, "window:20", position=name, num_kv_heads=2, **DOUBLE)
    x = torch.randn(2, 75, 32, **DOUBLE)
    wanted = by_hand(module, x, True, position=lambda q, k: turned_by_hand(q, k, None if name == "rotary" else True))
    assert error(module(x, is_causal=True)[0], wanted) < 1e-10


def test_xpos_does_not_depend_on_its_center_and_guards_its_range():
    x = torch.randn(1, 75, 32, **DOUBLE)
    near = MultiheadSparseAttention(32, 4, "window:20", position="xpos", **DOUBLE)
    far = MultiheadSparseAttention(32, 4, "window:20", position=Xpos(center=40), **DOUBLE)
    far.load_state_dict(near.state_dict())
    assert error(far(x, is_causal=True)[0], near(x, is_causal=True)[0]) < 1e-10
    low = MultiheadSparseAttention(32, 4, "window:20", position=Xpos(scale_base=1.0), dtype=torch.float16)
    with pytest.raises(ValueError, match="center"):
        low(x.half(), is_causal=True)


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_is_a_slope_of_the_distance(heads):
    module = MultiheadSparseAttention(8 * heads, heads, "dilated:16x1,64x4", position=Alibi(), **DOUBLE)
    x = torch.randn(2, 75, 8 * heads, **DOUBLE)
    counts = multiplicities(module.pattern & dap.Causal(), 75, heads)
    place = torch.arange(75).double()
    slope = 2.0 ** (-8.0 * torch.arange(1, heads + 1).double() / heads)
    # Added to the logarithm of the count, which is where the oracle takes a bias.
    counts = counts * (-slope[:, None, None] * (place[:, None] - place)).exp()
    q, k, v = (p(x).unflatten(-1, (heads, 8)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    wanted = module.out_proj(dense_attention(q, k, v, counts)[0].transpose(1, 2).flatten(2))
    assert error(module(x, is_causal=True)[0], wanted) < 1e-6
    with pytest.raises(ValueError, match="is_causal=True"):
        module(x)


def test_positions_far_out_stay_exact():
    q, k = (torch.randn(1, 2, 1, 64, dtype=torch.float32) for _ in range(2))
    at = torch.tensor([[1_000_000_000]])
    turned = [Rotary().apply(q, k, at + shift, 1.0) for shift in (0, 7)]
    assert error((turned[0][0] * turned[0][1]).sum(), (turned[1][0] * turned[1][1]).sum()) < 1e-5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_from_torch_computes_what_torch_does(bias, batch_first):
    mha = nn.MultiheadAttention(32, 4, bias=bias, batch_first=batch_first, **DOUBLE)
    module = MultiheadSparseAttention.from_torch(mha, "full")
    x = torch.randn(3, 20, 32, **DOUBLE)
    assert error(module(x, x, x)[0], mha(x, x, x)[0]) < 1e-12
    back = nn.MultiheadAttention(32, 4, bias=bias, batch_first=batch_first, **DOUBLE)
    back.load_state_dict(module.torch_state_dict())
    assert torch.equal(back(x, x, x)[0], mha(x, x, x)[0])


def test_a_state_dict_of_torch_loads_inside_a_model():
    theirs = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4)})
    ours = nn.ModuleDict({"attention": MultiheadDilatedAttention(32, 4, [16], [1], layer_norm=False)})
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(ours["attention"].k_proj.weight, theirs["attention"].in_proj_weight[32:64])
    grouped = MultiheadDilatedAttention(32, 4, [16], [1], layer_norm=False, num_kv_heads=2)
    with pytest.raises(RuntimeError, match=r"size mismatch for k_proj\.weight"):
        grouped.load_state_dict(theirs["attention"].state_dict())


@pytest.mark.parametrize(
    ("which", "message"), [(0, r"query .*n, 32\)"), (1, r"key .*n, 16\)"), (2, r"value .*n, 24\)")]
)
def test_a_width_that_is_not_the_modules_is_named(which, message):
    given = [torch.randn(1, 5, width) for width in (32, 16, 24)]
    module = MultiheadSparseAttention(32, 4, "window:2", kdim=16, vdim=24)
    assert module(*given)[0].shape == (1, 5, 32)
    given[which] = torch.randn(1, 5, 8)
    with pytest.raises(ValueError, match=message):
        module(*given)


@pytest.mark.parametrize("pattern", ["full", "window:9"])
def test_padding_of_another_length_than_the_keys_is_refused(pattern):
    module, padding = MultiheadSparseAttention(32, 4, pattern), torch.zeros(1, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(1, 7\)"):
        module(torch.randn(1, 5, 32), *torch.randn(2, 1, 7, 32), key_padding_mask=padding)


@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 4}])
def test_from_torch_keeps_frozen_parameters_frozen(widths):
    mha = nn.MultiheadAttention(8, 2, **widths)
    frozen = ["in_proj_weight", "out_proj.bias"] if not widths else ["k_proj_weight", "in_proj_bias"]
    for name in frozen:
        mha.get_parameter(name).requires_grad_(False)
    with torch.no_grad():
        module = MultiheadSparseAttention.from_torch(mha, "full", layer_norm=True)
    still = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    projections = {f"{n}_proj" for n in "qkv"}
    if widths:
        assert still == {"k_proj.weight", *(f"{name}.bias" for name in projections)}
    else:
        assert still == {"out_proj.bias", *(f"{name}.weight" for name in projections)}


def test_the_names_of_the_state(make):
    projections = [f"{name}_proj.{kind}" for name in ("q", "k", "v") for kind in ("weight", "bias")]
    norm = ["norm.weight", "norm.bias"] if make().norm is not None else []
    assert list(make().state_dict()) == [*projections, *norm, "out_proj.weight", "out_proj.bias"]


def test_copies_and_round_trips_compute_the_same(make):
    module, other = make(), make()
    x = torch.randn(1, 40, 32)
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(x)[0], other(x)[0])
    assert torch.equal(module(x)[0], copy.deepcopy(module)(x)[0])


def test_parameters_are_made_where_and_of_what_is_asked(make):
    module = make(device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert module.plan(100).density > 0
    shapes = module(torch.empty(1, 20, 32, device="meta", dtype=torch.bfloat16))[0]
    assert shapes.is_meta and shapes.shape == (1, 20, 32)
    made = module.to_empty(device="cpu")
    made.reset_parameters()
    assert made(torch.randn(1, 20, 32, dtype=torch.bfloat16))[0].isfinite().all()


def test_gamma_scales_value_and_output_projections():
    torch.manual_seed(0)
    one = MultiheadDilatedAttention(32, 4, [16], [1])
    torch.manual_seed(0)
    two = MultiheadDilatedAttention(32, 4, [16], [1], gamma_init=2.0)
    for name in "qk":
        assert torch.equal(getattr(two, f"{name}_proj").weight, getattr(one, f"{name}_proj").weight)
    assert torch.allclose(two.v_proj.weight, 2 * one.v_proj.weight)
    assert torch.allclose(two.out_proj.weight, 2 * one.out_proj.weight)


def test_dropout_acts_in_training_alone(make):
    module = make(dropout=0.5)
    x = torch.randn(1, 40, 32)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "multiple of num_heads"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"dropout": 1.0}, r"\[0, 1\)"),
        ({"position": "learned"}, "one of rotary"),
        ({"position": 3}, "a name or None"),
        ({"num_heads": 32, "position": "rotary"}, "even head width"),
        ({"segment_lengths": [1, 2], "dilation_rates": [64, 128]}, "Segment lengths come before"),
        ({"unknown": 1}, "unexpected keyword"),
    ],
)
@pytest.mark.untyped
def test_what_cannot_be_made_raises(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        MultiheadDilatedAttention(32, **{"num_heads": 4, "segment_lengths": [16], "dilation_rates": [1], **options})


def encoder(batch_first=True):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first)
    layer.self_attn = MultiheadSparseAttention.from_torch(layer.self_attn, "window:4")
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_an_encoder_layer_never_goes_around_the_module(training, padded):
    """In eval mode and without gradients nn.TransformerEncoderLayer has a path that computes dense attention."""
    model = encoder().train(training)
    calls = []
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda module, given, found: calls.append(found[0].isfinite().all()))
    x = torch.randn(2, 30, 32)
    padding = torch.arange(30) >= torch.tensor([30, 12])[:, None] if padded else None
    with torch.no_grad():
        output = model(x, src_key_padding_mask=padding)
        moved = x.clone()
        moved[:, -1] += 10.0
        far = model(moved, src_key_padding_mask=padding)
    assert len(calls) == 4
    assert torch.equal(output[:, :15], far[:, :15])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_an_encoder_with_a_causal_mask():
    model = encoder().eval()
    x = torch.randn(2, 30, 32)
    moved = x.clone()
    moved[:, 20:] += 1.0
    mask = nn.Transformer.generate_square_subsequent_mask(30)
    with torch.no_grad():
        assert torch.equal(model(x, mask)[:, :20], model(moved, mask)[:, :20])


def test_permuting_heads_permutes_what_they_find():
    module = MultiheadSparseAttention(32, 4, "window:9", **DOUBLE)
    x = torch.randn(1, 40, 32, **DOUBLE)
    other = copy.deepcopy(module)
    order = torch.arange(32).view(4, 8)[[2, 0, 3, 1]].flatten()
    with torch.no_grad():
        for projection in (other.q_proj, other.k_proj, other.v_proj):
            projection.weight.copy_(projection.weight[order])
            projection.bias.copy_(projection.bias[order])
        other.out_proj.weight.copy_(other.out_proj.weight[:, order])
    assert error(other(x)[0], module(x)[0].detach()) < 1e-12


def test_gradcheck():
    module = MultiheadDilatedAttention(8, 2, [4, 8], [1, 2], position="rotary", **DOUBLE)
    x = torch.randn(1, 10, 8, **DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: module(t, is_causal=True)[0], x)


def test_explain_says_where_segments_play_no_part():
    options = {"segment_lengths": [64], "dilation_rates": [1]}
    window = BlockSparseRingMultiheadDilatedAttention(32, 4, sparse_config=SparsePatternConfig(), **options)
    assert "a local_window pattern has no segments" in window.explain(4096)
    assert "no segments" not in BlockSparseRingMultiheadDilatedAttention(32, 4, **options).explain(4096)


def shards(module, count):
    """The module of each rank of a Colwise / Rowwise tensor-parallel plan; their outputs add up to the whole."""
    ranks = []
    for rank in range(count):
        shard = copy.deepcopy(module)
        for name in ("q_proj", "k_proj", "v_proj"):
            whole = module.get_submodule(name)
            part = nn.Linear(whole.in_features, whole.out_features // count, dtype=whole.weight.dtype)
            part.weight.data, part.bias.data = (p.chunk(count)[rank].clone() for p in (whole.weight, whole.bias))
            setattr(shard, name, part)
        shard.out_proj.weight.data = module.out_proj.weight.chunk(count, 1)[rank].clone()
        if rank:
            shard.out_proj.bias.data.zero_()
        ranks.append(shard)
    return ranks


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("dilated:16x1,64x4", {}),
        ("dilated:16x1,64x2 & window:20", {"num_kv_heads": 4, "position": "rotary"}),
        ("block_dilated:32x1;block=8", {"num_kv_heads": 2}),
        ("random:0.5;block=8", {}),
    ],
)
def test_tensor_parallel_shards_add_up(pattern, options):
    module = MultiheadSparseAttention(64, 8, pattern, dtype=torch.float64, **options)
    x = torch.randn(2, 64, 64, dtype=torch.float64)
    found = sum(shard(x, is_causal=True)[0] for shard in shards(module, 2))
    assert error(found, module(x, is_causal=True)[0].detach()) < 1e-12


@pytest.mark.parametrize(
    ("heads", "pattern", "options"),
    [
        (4, "dilated:16x1,64x4", {}),
        (8, "dilated:16x1,64x2;offset=block", {}),
        (8, "dilated:16x1,64x2;heads=split", {}),
        (8, "random:0.5;block=8;per_head=1", {}),
        (2, "heads{window:3 / window:5}", {}),
        (8, "window:9", {"position": "alibi"}),
    ],
)
def test_shards_of_differing_heads_are_refused(heads, pattern, options):
    module = shards(MultiheadSparseAttention(64, heads, pattern, **options), 2)[1]
    with pytest.raises(ValueError, match=rf"(?s)num_heads={heads} .* got {heads // 2} local heads.*context parallel"):
        module(torch.randn(1, 64, 64), is_causal=True)


def test_shards_that_split_heads_or_norms_are_refused():
    x = torch.randn(1, 16, 64)
    with pytest.raises(ValueError, match="layer_norm=False"):
        shards(MultiheadSparseAttention(64, 8, "window:9", layer_norm=True), 2)[0](x)
    with pytest.raises(ValueError, match="q_proj must give whole heads of 16, got 8"):
        shards(MultiheadSparseAttention(64, 4, "window:9"), 8)[0](x)
    module = MultiheadSparseAttention(64, 8, "window:9", num_kv_heads=2)
    uneven = shards(module, 2)[0]
    uneven.k_proj, uneven.v_proj = module.k_proj, module.v_proj
    with pytest.raises(ValueError, match="must divide num_heads and num_kv_heads, 8 and 2, alike"):
        uneven(x)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensor_parallel_shards_compile_whole():
    shard = shards(MultiheadSparseAttention(64, 8, "dilated:16x1,64x4", dtype=torch.float64), 2)[1]
    x = torch.randn(1, 64, 64, dtype=torch.float64)
    compiled = torch.compile(shard, fullgraph=True, backend="aot_eager")
    assert error(compiled(x)[0], shard(x)[0].detach()) < 1e-12


def with_drawn_sink(**options):
    torch.manual_seed(0)
    layer = MultiheadSparseAttention(32, 4, "window:9", sink=True, num_kv_heads=2, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.sink.copy_(torch.randn(4))
    return layer


def attended(layer, query, key, **options):
    q, k, v = layer.project(query, key, key)
    return layer.finish(dap.attention(q, k, v, layer.pattern, enable_gqa=True, sink=layer.sink, **options))


@pytest.mark.parametrize("is_causal", [False, True])
def test_learned_sink_matches_attention_with_sink(is_causal):
    layer, x = with_drawn_sink(), torch.randn(2, 50, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 50, 32, dtype=torch.float64)
    found = layer(x, is_causal=is_causal)[0]
    wanted = attended(layer, x, x, is_causal=is_causal)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    grads = [torch.autograd.grad((y * weight).sum(), (x, layer.sink)) for y in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
    assert grads[0][1].abs().min() > 1e-3
    layer.sink.data.fill_(-torch.inf)
    plain = MultiheadSparseAttention(32, 4, "window:9", num_kv_heads=2, dtype=torch.float64)
    plain.load_state_dict({name: x for name, x in layer.state_dict().items() if name != "sink"})
    torch.testing.assert_close(layer(x)[0], plain(x)[0], rtol=0, atol=1e-14)


def test_learned_sink_is_part_of_the_state_and_starts_at_zero():
    layer = with_drawn_sink()
    other = MultiheadSparseAttention(32, 4, "window:9", sink=True, num_kv_heads=2, dtype=torch.float64)
    assert torch.equal(other.sink, torch.zeros(4, dtype=torch.float64)) and "sink=True" in repr(other)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    assert torch.equal(other(x)[0], layer(x)[0])
    other.reset_parameters()
    assert not other.sink.any()
    assert "sink" not in MultiheadSparseAttention(32, 4, "window:9").state_dict()
    with pytest.raises(ValueError, match="nothing more, got a sink"):
        MultiheadSparseAttention(32, 4, "window:9", sink=True).torch_state_dict()


@torch.no_grad()
def test_learned_sink_holds_in_decoding_and_cross_attention():
    layer, x = with_drawn_sink().eval(), torch.randn(2, 30, 32, dtype=torch.float64)
    whole, cache = layer(x, is_causal=True)[0], layer.cache()
    parts = [layer(part, is_causal=True, cache=cache)[0] for part in (x[:, :20], x[:, 20:21], x[:, 21:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    layer.pattern = dap.parse("full")
    keys = torch.randn(2, 17, 32, dtype=torch.float64)
    q, k, v = layer.project(x, keys, keys)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = torch.cat([q @ k.mT * 8**-0.5, layer.sink[:, None, None].expand(2, 4, 30, 1)], -1)
    wanted = layer.finish(scores.softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(layer(x, keys)[0], wanted, rtol=0, atol=1e-12)


def test_learned_sink_refuses_dense_weights():
    layer, x = with_drawn_sink(), torch.randn(1, 8, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="need_weights=True must come without a sink"):
        layer(x, need_weights=True)
    with pytest.raises(ValueError, match="a mask added to the scores must come without a sink"):
        layer(x, attn_mask=torch.zeros(8, 8, dtype=torch.float64).masked_fill(torch.rand(8, 8) < 0.5, 0.5))
    with pytest.raises(ValueError, match="learned attention must come without a sink"):
        dap.MultiheadBlockSparseAdaptive(32, 4, [64], [1], block_size=16, sink=True)
