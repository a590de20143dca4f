"""Decoding: each new token's row is that row of the full computation, whatever was dropped on the way."""

from __future__ import annotations

import pytest
import torch
from oracle import answer, error

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import Pattern, parse
from dilated_attention_pytorch.nn import KVCache, MultiheadDilatedAttention, MultiheadSparseAttention
from dilated_attention_pytorch.ops.decode import attention_step, live_keys, seen_keys

N = 100
PATTERNS = [
    "full",
    "causal",
    "window:7",
    "window:7 | global:3",
    "window:20 & dilated:32x2",
    "global:5;queries=1 | window:3",
    "dilated:16x1,64x4",
    "dilated:12x1,30x3;overlap=union",
    "dilated:16x1,64x4;offset=block",
    "dilated:16x1,64x4;heads=split",
    "strided:7",
    "strided:2;block=16",
    "block_dilated:24x1,64x2;block=16",
    "block_dilated:64x1;sparsity_ratio=0.3;block=16",
    "hierarchical:1x1,3x2,0x3;block=16",
    "random:0.4;block=16;seed=1;per_head=1 | window:0",
    "heads{window:4 / causal / dilated:16x4 / block_dilated:32x1;block=16}",
]
FOLLOW_LENGTH = ("sparsity_ratio", "random")


def length_of(text):
    return N if any(word in text for word in FOLLOW_LENGTH) else None


def tensors(heads=4, key_heads=2, n=N, batch=2):
    shapes = ((batch, heads, n, 8), (batch, key_heads, n, 8), (batch, key_heads, n, 6))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("text", PATTERNS)
def test_every_row_is_that_of_the_full_computation(text):
    q, k, v = tensors()
    wanted = answer(q, k, v, parse(text) & dap.Causal()).output
    cache = KVCache(text, length_of(text))
    found = [cache.attend(*(t[:, :, :13] for t in (q, k, v)))]
    found += [cache.attend(*(t[:, :, i : i + 1] for t in (q, k, v))) for i in range(13, N - 5)]
    found.append(cache.attend(*(t[:, :, N - 5 :] for t in (q, k, v))))
    assert error(torch.cat(found, 2), wanted) < 1e-10
    assert cache.lengths == [N, N]


@pytest.mark.parametrize("text", PATTERNS)
def test_samples_of_different_lengths(text):
    q, k, v = tensors()
    prompts = (40, 9)
    cache = KVCache(text, length_of(text), prompt_lengths=prompts)
    prompt = cache.attend(*(t[:, :, :40] for t in (q, k, v)))
    wanted = answer(q, k, v, parse(text) & dap.Causal()).output
    for sample, length in enumerate(prompts):
        assert error(prompt[sample, :, :length], wanted[sample, :, :length]) < 1e-10
    for step in range(50):
        at = [length + step for length in prompts]
        found = cache.attend(*(torch.stack([t[b, :, i : i + 1] for b, i in enumerate(at)]) for t in (q, k, v)))
        assert error(found, torch.stack([wanted[b, :, i : i + 1] for b, i in enumerate(at)])) < 1e-10


@pytest.mark.parametrize("rows", [63, 70])
def test_a_second_prompt_follows_on_the_first(rows):
    q, k, v = tensors()
    cache = KVCache("dilated:16x1,64x4")
    cache.attend(*(t[:, :, : N - rows] for t in (q, k, v)))
    found = cache.attend(*(t[:, :, N - rows :] for t in (q, k, v)))
    assert error(found, answer(q, k, v, parse("dilated:16x1,64x4 & causal")).output[:, :, N - rows :]) < 1e-10


@pytest.mark.parametrize("text", PATTERNS)
def test_no_later_row_sees_what_may_be_dropped(text):
    pattern = parse(text)
    counts = (pattern & dap.Causal()).resolve(N, 4)
    place = torch.arange(N)
    seen = torch.stack([torch.as_tensor(counts.multiplicity(place[:, None], place, h)) for h in range(4)]).sum(0) > 0
    for t in range(N):
        kept = live_keys(pattern, length_of(text), t, 4)
        held = (place < kept.sinks) | (place >= kept.begin)
        assert not (seen[t:] & ~held).any(), t


@pytest.mark.parametrize(
    ("text", "most"), [("window:7", 40), ("window:7 | global:3", 46), ("dilated:16x1", 64), ("dilated:16x1,64x4", 256)]
)
def test_memory_stays_bounded(text, most):
    cache = KVCache(text)
    for _ in range(600):
        cache.attend(*(torch.randn(1, 2, 1, 4) for _ in range(3)))
        assert cache.tokens <= most
    assert cache.nbytes <= 2 * 2 * most * 2 * 4 * 4


@pytest.mark.parametrize(
    ("text", "most"),
    [("window:7", 8), ("dilated:1024x64", 16), ("block_dilated:64x1;block=16", 64), ("strided:100", 11)],
)
def test_a_row_looks_at_the_keys_it_sees_alone(text, most):
    assert seen_keys(parse(text), None, 1023, 64).positions.shape[1] <= most


@pytest.mark.parametrize("positions", [torch.tensor(40), torch.tensor([40, 40]), [40, 40]])
def test_positions_may_be_a_tensor_or_a_list(positions):
    q, k, v = tensors()
    wanted = attention_step(q[:, :, 40:41], k, v, "dilated:16x1,64x4", 40, enable_gqa=True)
    found = attention_step(q[:, :, 40:41], k, v, "dilated:16x1,64x4", positions, enable_gqa=True)
    assert torch.equal(found, wanted)


def test_the_keys_of_padding_take_no_part():
    q, k, v = tensors()
    padding = torch.arange(N) < torch.tensor([0, 30])[:, None]
    wanted = answer(q, k, v, parse("window:20 & causal"), key_padding_mask=padding).output
    for t in (15, 35, 99):
        found = attention_step(q[:, :, t : t + 1], k, v, "window:20", t, enable_gqa=True, key_padding_mask=padding)
        assert error(found, wanted[:, :, t : t + 1]) < 1e-10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_padding_that_is_not_finite_reaches_no_gradient(bad):
    leaves = list(torch.randn(3, 1, 2, 20, 8, dtype=torch.float64).unbind())
    padding = torch.arange(20)[None] == 15
    for x in leaves[1:]:
        x[:, :, 15] = bad
    query, key, value = (x.requires_grad_() for x in leaves)
    row = attention_step(query[:, :, 17:18], key, value, "window:9", 17, key_padding_mask=padding)
    grads = torch.autograd.grad(row.sum(), [query, key, value])
    assert row.isfinite().all() and all(grad.isfinite().all() for grad in grads)


def test_a_beam_goes_on_from_another():
    q, k, v = tensors()
    cache = KVCache("window:20")
    cache.attend(*(t[:, :, :50] for t in (q, k, v)))
    cache.reorder(torch.tensor([1, 1]))
    found = cache.attend(*(t[:, :, 50:51] for t in (q, k, v)))
    k, v = (torch.cat([t[[1, 1], :, :50], t[:, :, 50:]], 2) for t in (k, v))
    assert error(found, answer(q, k, v, parse("window:20 & causal")).output[:, :, 50:51]) < 1e-10


@pytest.mark.parametrize("position", [None, "rotary", "xpos", "alibi"])
def test_a_module_decodes_what_it_computes(position):
    module = MultiheadDilatedAttention(32, 4, [16, 64], [1, 4], num_kv_heads=2, position=position, dtype=torch.float64)
    x = torch.randn(2, N, 32, dtype=torch.float64)
    wanted = module(x, is_causal=True)[0]
    cache = module.cache()
    with torch.no_grad():
        found = [module(x[:, :30], is_causal=True, cache=cache)[0]]
        found += [module(x[:, i : i + 1], is_causal=True, cache=cache)[0] for i in range(30, N)]
    assert error(torch.cat(found, 1), wanted) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    q, k, v = (t.to(dtype) for t in tensors())
    wanted = answer(q, k, v, parse("dilated:16x1,64x4 & causal")).output[:, :, 90:91]
    found = attention_step(q[:, :, 90:91], k, v, "dilated:16x1,64x4", 90, enable_gqa=True)
    assert found.dtype == dtype
    assert error(found, wanted) < (2e-6 if dtype == torch.float32 else 8e-3)


def test_prompt_lengths_may_be_a_tensor():
    rows = torch.randn(2, 1, 4, 8)
    cache = KVCache("window:7", prompt_lengths=torch.tensor([4, 2]))
    cache.attend(rows, rows, rows)
    assert cache.lengths == [4, 2] and all(type(length) is int for length in cache.lengths)


def misuse(text="window:7", length=None, prompt_lengths=None, times=1, **options):
    cache = KVCache(text, length, prompt_lengths)
    for _ in range(times):
        cache.attend(*(torch.randn(2, 2, 4, 8, **options) for _ in range(3)))


ROWS = torch.ones(1, 2, 4, 8)


def step(**changed):
    given = {"query": ROWS[:, :, :1], "key": ROWS, "value": ROWS, "pattern": "causal", "positions": 3}
    return attention_step(**{**given, **changed})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: misuse("random:0.5"), "length must be given"),
        (lambda: misuse("window:7 & block_dilated:64x1;sparsity_ratio=0.5"), "length must be given"),
        (lambda: misuse("documents:4,4"), "one sequence"),
        (lambda: misuse(length=6, times=2), "must not be given more"),
        (lambda: misuse(prompt_lengths=[4]), "2 numbers"),
        (lambda: misuse(prompt_lengths=[5, 1]), "in 1 .. 4"),
        (lambda: misuse(times=2, requires_grad=True), "without gradients"),
        (lambda: attention_step(*(torch.randn(1, 2, 4, 8) for _ in range(3)), "causal", 3), "hold the keys"),
        (lambda: attention_step(*(torch.randn(1, 2, 4, 8) for _ in range(3)), "causal", -1), ">= 0"),
        (lambda: attention_step(torch.randn(1, 4, 1, 8), *torch.randn(2, 1, 2, 4, 8), "causal", 3), "enable_gqa"),
        (lambda: step(query=ROWS[0, 0]), "query must have shape"),
        (lambda: step(key=ROWS.double(), value=ROWS.double()), "key must have the query's dtype"),
        (lambda: step(value=ROWS.bfloat16()), "value must have the query's dtype"),
        (lambda: step(query=ROWS.double()[:, :, :1]), "the query's dtype torch.float64"),
        (lambda: step(value=ROWS[:, :, :3]), "the key's length 4"),
        (lambda: step(pattern=3), "a Pattern or text, got int"),
        (lambda: step(scale=float("nan")), "finite"),
        (lambda: step(key_padding_mask=torch.zeros(1, 3, dtype=torch.bool)), r"shape \(1, 4\)"),
        (lambda: step(key_padding_mask=torch.zeros(1, 4)), "must be bool"),
    ],
)
@pytest.mark.untyped
def test_misuse_raises(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :1], v[:, :1]), "the cache's 2 heads of width 8"),
        (lambda q, k, v: (q, k, v[..., :4]), "value must have the cache's 2 heads"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "the cache's dtype"),
        (lambda q, k, v: (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)), "the query's length 1"),
        (lambda q, k, v: (q[0], k[0], v[0]), "must have shape"),
    ],
)
@pytest.mark.untyped
def test_tokens_unlike_those_held_are_refused_and_not_counted(change, message):
    tensors = torch.randn(3, 1, 2, 5, 8).unbind()
    cache = KVCache("window:3")
    cache.attend(*(t[:, :, :4] for t in tensors))
    with pytest.raises((ValueError, TypeError), match=message):
        cache.attend(*change(*(t[:, :, 4:] for t in tensors)))
    wanted = answer(*tensors, parse("window:3 & causal")).output[:, :, 4:]
    assert error(cache.attend(*(t[:, :, 4:] for t in tensors)), wanted) < 2e-6


def test_under_autocast_tokens_may_come_in_two_dtypes():
    query, key, value = torch.randn(3, 1, 2, 9, 8).unbind()
    cache, value = KVCache("window:3"), value.bfloat16()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = [cache.attend(*(t[:, :, rows] for t in (query, key, value))) for rows in (slice(0, 6), slice(6, 9))]
    assert error(torch.cat(found, 2), answer(query, key, value.float(), parse("window:3 & causal")).output) < 2e-2


@pytest.mark.parametrize("read", [0, 4])
def test_a_call_that_failed_can_be_made_again(read):
    tensors = torch.randn(3, 1, 2, 70, 8).unbind()
    cache, rest = KVCache("window:3"), [t[:, :, read:] for t in tensors]
    if read:
        cache.attend(*(t[:, :, :read] for t in tensors))
    with pytest.raises(ValueError, match="backend must be one of"):
        cache.attend(*rest, backend="none")
    assert error(cache.attend(*rest), answer(*tensors, parse("window:3 & causal")).output[:, :, read:]) < 2e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "causal self-attention"),
        ({"is_causal": True, "key_padding_mask": torch.zeros(1, 4, dtype=torch.bool)}, "without masks"),
        ({"is_causal": True, "need_weights": True}, "whole sequences, got a cache"),
    ],
)
def test_a_cache_is_for_causal_self_attention(options, message):
    module = MultiheadSparseAttention(8, 1, "window:3")
    with pytest.raises(ValueError, match=message):
        module(torch.randn(1, 4, 8), cache=module.cache(), **options)
    with pytest.raises(ValueError, match="made for window:3"):
        module(torch.randn(1, 4, 8), cache=KVCache("window:4"), is_causal=True)


@pytest.mark.parametrize("rows", [1, 63, 64, 70])
def test_a_cache_of_another_dtype_is_refused_at_any_length(rows):
    query, cache = torch.randn(1, 2, rows, 8), torch.randn(1, 2, 80, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"key must have the query's dtype torch\.float32, got torch\.bfloat16"):
        attention_step(query, cache, cache, "window:9", 0)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_autocast_rounds_inputs_and_not_products(rows):
    query, key, value, sink = torch.randn(1, 4, rows, 16), *(5 * torch.randn(2, 1, 2, 80, 16)).unbind(), torch.randn(4)
    options = {"sink": sink, "softcap": 9.0, "bias": torch.randn(4, 31), "enable_gqa": True}
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_step(query, key, value, "window:9", 0, **options)
    wanted = attention_step(*(x.bfloat16() for x in (query, key, value)), "window:9", 0, **options)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 64])
def test_autocast_makes_cache_and_query_one_dtype(rows):
    query, cache = torch.randn(1, 2, rows, 8), torch.randn(1, 2, 80, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_step(query, cache, cache, "window:9", 0)
        with pytest.raises(TypeError, match="the query's dtype"):
            attention_step(query, cache.double(), cache.double(), "window:9", 0)
    wanted = attention_step(query, cache.float(), cache.float(), "window:9", 0)
    torch.testing.assert_close(found.float(), wanted, atol=2e-2, rtol=0)


def test_steps_without_keys_are_in_the_graph():
    x, sink = torch.randn(1, 1, 5, 4, requires_grad=True), torch.zeros(1, requires_grad=True)
    nothing = Pattern.from_mask(torch.zeros(5, 5, dtype=torch.bool))
    output = attention_step(x[:, :, -1:], x, x, nothing, 4, length=5, sink=sink)
    assert not output.any()
    assert not any(grad.any() for grad in torch.autograd.grad(output.sum(), (x, sink)))
