"""Mistakes of a first hour: each raises or warns with the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dilated_attention_pytorch as dap

ROWS = torch.randn(3, 1, 2, 20, 8).unbind()
X = torch.randn(1, 20, 16)


@pytest.mark.parametrize("function", [dap.attention, dap.attention_with_lse])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("attn_mask", r"pass Pattern.from_mask\(mask\)"),
        ("causal", "the argument is is_causal"),
        ("softmax_scale", "the argument is scale"),
        ("score_mod", "bias adds a table by distance"),
        ("alibi_slopes", r"the argument is bias=distance_bias\(slopes, n - 1\)"),
        ("position_bias", "the argument is bias, a table by distance"),
        ("unheard_of", "'unheard_of'$"),
    ],
)
def test_arguments_of_other_libraries_lead_to_ours(function, name: str, advice: str):
    with pytest.raises(
        TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument '{name}'.*{advice}|{advice}"
    ):
        function(*ROWS, "full", **{name: True})


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dap.attention(*ROWS, "full", cu_seqlens=[0, 20]), "cu_seqlens must be a Tensor, got list"),
        (lambda: dap.attention(*ROWS, "full", key_padding_mask=[True]), "key_padding_mask must be a Tensor, got list"),
        (lambda: dap.MultiheadSparseAttention(16, 2, "causal")(X, is_causal=True, cache=True), r"must be a KVCache, got True[^$]*module.cache\(\)"),
        (lambda: dap.attention(*ROWS, "full", scale="0.1"), "scale must be a number, got '0.1'"),
        (lambda: dap.select_blocks(*ROWS[:2], "mean", "4"), "budget must be a number of blocks, or a share as a float, got '4'"),
        (lambda: dap.register_pattern(dap.Causal), r"register_pattern must have a name, got [^$]*@register_pattern\(\"name\"\)"),
    ],
)  # fmt: skip
def test_wrong_types_are_named(make, message: str):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.untyped
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_lead_to_packing(layout: torch.layout):
    if layout == torch.strided:
        nested = torch.nested.nested_tensor([torch.randn(2, 5, 8), torch.randn(2, 7, 8)])
    else:
        nested = torch.nested.nested_tensor([torch.randn(5, 2, 8), torch.randn(7, 2, 8)], layout=layout).transpose(1, 2)
    with pytest.raises(TypeError, match=r"query must be a dense tensor, got a nested one[^$]*cu_seqlens"):
        dap.attention(nested, nested, nested, "full")
    rows = torch.nested.nested_tensor([torch.randn(5, 16), torch.randn(7, 16)], layout=layout)
    for module in (dap.MultiheadDilatedAttention(16, 2, [4], [1]), dap.MultiheadBlockSparseAdaptive(16, 2, [4], [1])):
        with pytest.raises(TypeError, match="query must be a dense tensor, got a nested one"):
            module(rows, rows, rows)


def test_close_names_of_backends_are_suggested():
    with pytest.raises(ValueError, match=r"got 'natve'\nDid you mean 'native'\?"):
        dap.attention(*ROWS, "full", backend="natve")


def test_token_ids_beyond_the_vocabulary_are_named():
    model = dap.LongNetLM(dap.LongNetConfig.named("tiny", num_decoder_layers=1))
    with pytest.raises(IndexError, match="tokens must be ids from 0 to 255, got 1 to 300"):
        model(torch.tensor([[1, 300]]))


def test_plans_of_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match=r"at most 16,777,216 tiles per side, got 1,000,000,000,000 tokens"):
        dap.make_plan("window:512", 10**12, 8)


def test_swapped_axes_are_a_warning():
    rows = torch.randn(3, 1, 200, 4, 8).unbind()
    with pytest.warns(UserWarning, match="query has 200 heads of 4 tokens: are the axes swapped"):
        dap.attention(*rows, "full")
    with pytest.warns(UserWarning, match="query has 200 heads of 4 tokens"):
        dap.SparseAttention("full")(*(x.transpose(1, 2) for x in rows))


def test_state_dicts_of_torch_name_the_layer_norm():
    module = dap.MultiheadDilatedAttention(16, 2, [8], [1])
    state = nn.MultiheadAttention(16, 2).state_dict()
    with pytest.raises(RuntimeError, match=r"has a LayerNorm before its output projection[^$]*layer_norm=False"):
        module.load_state_dict(state)
    module.load_state_dict(state, strict=False)
    dap.MultiheadDilatedAttention(16, 2, [8], [1], layer_norm=False).load_state_dict(state)


def test_explain_names_the_width_of_a_head():
    assert "4 heads of 16" in dap.MultiheadSparseAttention(64, 4, "window:8").explain(100)
    assert "4 heads of 32" in dap.SparseAttention("window:8").explain(100, num_heads=4, head_dim=32)
