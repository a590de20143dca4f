"""Decoding with learned attention: step t is row t of the whole computation, choices included."""

from __future__ import annotations

import pytest
import torch
from oracle import error

from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive, KVCache, MultiheadBlockSparseAdaptive
from dilated_attention_pytorch.nn.adaptive import decoding as cache_module
from dilated_attention_pytorch.selection import scores as scores_module

N = 100


def module(bias=True, **config):
    settings = {"base_sparsity": 0.6, "score_unit": 4, "local_blocks": 2, "sink_blocks": 1, **config}
    made = MultiheadBlockSparseAdaptive(
        32, 4, [256], [1], 0.0, bias, AdaptiveConfig(**settings), block_size=16, position="rotary", num_kv_heads=2
    )
    return made.double().eval()


def decode(layer, x, prompt, pieces=()):
    """Outputs of a prompt, then of pieces of so many tokens, then one by one."""
    cache, found, at = layer.cache(), [], 0
    with torch.no_grad():
        for rows in (prompt, *pieces, *[1] * (x.shape[1] - prompt - sum(pieces))):
            found.append(layer(x[:, at : at + rows], is_causal=True, cache=cache)[0])
            at += rows
    return torch.cat(found, 1), cache


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"granularity": "block"},
        {"adaptive_ratio": 0.6},
        {"base_sparsity": 0.0},
        {"local_blocks": 1, "sink_blocks": 0, "k_min": 1, "k_max": 2, "match_rank": 0},
        {"share_across_heads": True, "num_layers": 3},
        {"select": "group"},
        {"select": "all", "granularity": "block"},
    ],
)
def test_a_step_is_a_row_of_the_whole_computation(config):
    layer = module(**config)
    x = torch.randn(2, N, 32, dtype=torch.float64)
    wanted = layer(x, is_causal=True)[0]
    for prompt, pieces in ((1, (60,)), (50, (5, 16, 7)), (80, ())):
        found, cache = decode(layer, x, prompt, pieces)
        assert error(found, wanted) < 1e-12
    assert cache.lengths == [N, N]
    assert cache.nbytes > 2 * 2 * 2 * N * 8 * 8


@pytest.mark.parametrize("pieces", [(), (5, 20, 7), (29, 1)])
def test_steps_see_everything_while_the_sequence_is_short(pieces):
    layer = module(dense_below=60)
    x = torch.randn(1, 80, 32, dtype=torch.float64)
    found, _ = decode(layer, x, 30, pieces)
    with torch.no_grad():
        for end in (30, 31, 48, 59, 60, 61, 80):
            wanted = layer(x[:, :end], is_causal=True)[0][:, -1]
            assert error(found[:, end - 1], wanted) < 1e-12


def test_steps_keep_as_many_blocks_as_the_whole_computation():
    # 0.7 of 45 blocks lies between 31 and 32, and rounds up in float32 only.
    layer = module(base_sparsity=0.3, local_blocks=1, sink_blocks=0)
    x = torch.randn(1, 46 * 16, 32, dtype=torch.float64)
    wanted = layer(x, is_causal=True)[0]
    found, _ = decode(layer, x, 44 * 16, (16, 16))
    assert error(found, wanted) < 1e-12


def test_samples_of_different_lengths_go_on_from_where_they_are():
    layer = module()
    lengths = [40, 64, 7]
    x = torch.randn(3, N, 32, dtype=torch.float64)
    cache = layer.cache()
    cache.prompt_lengths = lengths
    with torch.no_grad():
        prompt = layer(x[:, :64], is_causal=True, cache=cache)[0]
        following = [x[i, length : length + 30] for i, length in enumerate(lengths)]
        steps = [
            layer(torch.stack([f[t : t + 1] for f in following]), is_causal=True, cache=cache)[0] for t in range(30)
        ]
        found = torch.cat(steps, 1)
        for i, length in enumerate(lengths):
            wanted = layer(x[i : i + 1, : length + 30], is_causal=True)[0][0]
            assert error(prompt[i, :length], wanted[:length]) < 1e-12
            assert error(found[i], wanted[length:]) < 1e-12


def test_beams_take_their_choices_along():
    layer = module()
    x = torch.randn(2, N, 32, dtype=torch.float64)
    order = torch.tensor([1, 1])
    cache = layer.cache(length=N)
    with torch.no_grad():
        layer(x[:, :70], is_causal=True, cache=cache)
        cache.reorder(order)
        found = [layer(x[order, t : t + 1], is_causal=True, cache=cache)[0] for t in range(70, N)]
        assert error(torch.cat(found, 1), layer(x[order], is_causal=True)[0][:, 70:]) < 1e-12
        with pytest.raises(ValueError, match="cache for 100 tokens"):
            layer(x[:, :1], is_causal=True, cache=cache)


def test_many_blocks_and_little_memory_change_nothing(monkeypatch):
    """Candidates by super-blocks are those of the computation over the tokens so far."""
    layer = module(base_sparsity=0.9)
    x = torch.randn(1, N, 32, dtype=torch.float64)
    plain = layer(x, is_causal=True)[0]
    monkeypatch.setattr(cache_module, "GATHERED", 1)
    assert error(decode(layer, x, 10, (60,))[0], plain) < 1e-12
    monkeypatch.setattr(scores_module, "ALL_PAIRS", 4)
    monkeypatch.setattr(scores_module, "SUPER", 2)
    found = decode(layer, x, 80)[0]
    for t in (80, 95, 99):
        assert error(found[:, t], layer(x[:, : t + 1], is_causal=True)[0][:, t]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_decodes(dtype):
    layer = module(base_sparsity=0.0).to(dtype)
    x = torch.randn(1, 40, 32, dtype=dtype)
    assert error(decode(layer, x, 20)[0], layer(x, is_causal=True)[0]) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("config", [{}, {"granularity": "block"}, {"select": "group"}], ids=str)
def test_rounded_matches_select_the_blocks_of_the_whole(config):
    layer = module(base_sparsity=0.8, score_unit=1, local_blocks=1, sink_blocks=0, **config).bfloat16().core
    query, key, value = (torch.randn(2, 8 * N, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    cache, found = cache_module.AdaptiveCache(layer), []
    with torch.no_grad():
        whole, pattern = layer(query, key, value, is_causal=True, return_pattern=True)
        for some in (slice(0, 6 * N), slice(6 * N, 7 * N + 3), slice(7 * N + 3, 8 * N)):
            piece = (x[:, some].transpose(1, 2) for x in (query, key, value))
            found.append(cache.attend(*piece).transpose(1, 2))
    assert float(pattern.density) < 0.3
    # Another block would change a row by more than the rounding of the output.
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=2**-9, rtol=2**-7)


def test_features_of_16_bit_keys_take_little_more_than_a_quarter():
    layer = BlockSparseAdaptive([1], [1], 2, 64, AdaptiveConfig(hidden_dim=8), block_size=64).bfloat16().eval()
    cache, tokens = cache_module.AdaptiveCache(layer), 32 * 64
    with torch.no_grad():
        cache.attend(*torch.randn(3, 1, 2, tokens, 64, dtype=torch.bfloat16))
    features = sum(x.nbytes for x in cache._features)
    assert features < 0.3 * 2 * 2 * 2 * tokens * 64, "keys and values of two heads in two bytes"


def test_what_a_cache_cannot_follow_is_refused():
    layer, x = module(), torch.randn(1, 20, 32, dtype=torch.float64)
    for call, words in (
        (lambda: layer(x, cache=layer.cache()), "causal self-attention"),
        (lambda: layer(x, is_causal=True, cache=KVCache("full")), "made by this module"),
        (lambda: layer(x, is_causal=True, cache=module().cache()), "made by this module"),
        (lambda: layer(x, is_causal=True, cache=layer.cache(), return_pattern=True), "one whole sequence"),
        (lambda: layer.train()(x, is_causal=True, cache=layer.cache()), "does not explore"),
        (lambda: module(hard_sparsity=False).cache(), "kept as they are"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_steps_under_autocast_round_inputs_alone():
    layer = module().float()
    tensors, cache, found = torch.randn(3, 1, 50, 4, 8).unbind(), layer.cache(), []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = layer.core(*tensors, is_causal=True)
        for rows in (slice(0, 40), slice(40, 50)):
            found.append(cache.attend(*(x[:, rows].transpose(1, 2) for x in tensors)).transpose(1, 2))
    assert [x.dtype for x in (whole, *found)] == 3 * [torch.bfloat16]
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-6, rtol=2**-8)
