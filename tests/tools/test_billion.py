"""The long run at small sizes: its checks can fail, and its search finds the edge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from docs_pages import longest as longest_script
from oracle import answer, dense_attention, error
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dilated_attention_pytorch import Random
from dilated_attention_pytorch.nn.streamed import StreamedLayer
from dilated_attention_pytorch.tools import billion
from dilated_attention_pytorch.tools.bench import extreme


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    out = tmp_path / "billion.jsonl"
    small = ("--device", "cpu", "--heads", "2", "--head-dim", "16", "--rows", "60", "--out", str(out))
    status = billion.main([*small, *arguments])
    return status, json.loads(out.read_text().splitlines()[-1])


@pytest.mark.parametrize("extra", [("--backward",), ("--causal",)])
def test_a_small_run_computes_and_checks_every_row_it_says(tmp_path: Path, extra: tuple[str, ...], capsys):
    status, line = run(tmp_path, "--tokens", "9000", "--chunk", "2048", *extra)
    assert status == 0 and line["passed"] and line["rows_computed"] == 9000 and line["rows_checked"] >= 60
    assert line["largest_error"] <= 1e-5 and line["pattern"] == "dilated:2048x1,8192x4,32768x16"
    assert ("backward_seconds" in line) == ("--backward" in extra)
    told = capsys.readouterr().out
    assert "9,000 tokens" in told and told.endswith("passed\n")


def test_half_precision_error_is_at_most_twice_dense(tmp_path: Path):
    status, line = run(tmp_path, "--tokens", "3000", "--dtype", "bfloat16")
    assert status == 0 and line["largest_error"] <= line["error_allowed"] == 2 * line["sdpa_error"] < 1e-2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--heads", "0"), "--heads: the value must be a whole number from 1"),
        (("--rows", "0"), "--rows: tokens must be a whole number"),
        (("--tokens", "0"), "--tokens/--context: tokens must be a whole number"),
        (("--dtype", "int8"), "--dtype: the value must be one of bfloat16"),
    ],
)
def test_wrong_options_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], options, says: str):
    with pytest.raises(SystemExit):
        run(tmp_path, "--tokens", "1K", *options)
    assert says in capsys.readouterr().err


def test_a_missing_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is available"):
        run(tmp_path, "--tokens", "1K", "--device", "cuda")


def test_a_wrong_row_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    watched = billion.Watch.__call__

    def disturbed(self, begin: int, output: torch.Tensor, lse: torch.Tensor) -> None:
        watched(self, begin, output.roll(1, 2), lse)

    monkeypatch.setattr(billion.Watch, "__call__", disturbed)
    status, line = run(tmp_path, "--tokens", "3000", "--chunk", "2048")
    assert status == 1 and not line["passed"] and line["largest_error"] > 1e-2


def test_checked_rows_cover_branch_edges_and_residues():
    pattern = billion.ladder(2**22)
    rows = billion.sample_rows(pattern, 2**22, 8, 1000)
    assert len(rows) >= 1000 and rows[0] == 0 and rows[-1] == 2**22 - 1
    for index, (segment, rate) in enumerate(pattern.branches):
        assert {0, segment - 1} <= set(rows) or segment > 2**22
        assert any(row % segment % rate == pattern.sampled_residue(index, 7) for row in rows)
    assert len({row % 16 for row in rows}) == 16


def test_the_oracle_lists_the_keys_of_the_pattern():
    n, heads = 9000, 4
    pattern = billion.ladder(n)
    for row in (0, 3, 2047, 2048, 8195, 8999):
        for head in range(heads):
            for causal in (False, True):
                counts = torch.zeros(n, dtype=torch.int64)
                for span in billion.keys_of(pattern, row, head, n, causal):
                    counts[span.start : span.stop : span.step] += 1
                wanted = pattern.multiplicity(row, torch.arange(n), head)
                assert torch.equal(counts, torch.where(torch.arange(n) <= row, wanted, 0) if causal else wanted)


@pytest.mark.parametrize(("n", "steps"), [(1, 1), (2048, 1), (2049, 2), (2**22, 7), (2**30, 11)])
def test_the_ladder_ends_with_the_first_segment_that_holds_all(n: int, steps: int):
    lengths = billion.ladder(n).segment_lengths
    assert len(lengths) == steps and lengths[-1] >= n and (steps == 1 or lengths[-2] < n)


def test_token_ids_are_the_same_however_many_there_are():
    ids = billion.token_ids(5000, "cpu")
    assert torch.equal(ids[:100], billion.token_ids(100, "cpu")) and len(ids.unique()) == 256


def test_a_gradient_that_is_wrong_breaks_an_identity():
    layer = StreamedLayer(32, 2, billion.ladder(600), max_tokens=600, dtype=torch.float64)
    pooled = layer(billion.token_ids(600, "cpu"), chunk=256)
    grad = torch.ones_like(pooled)
    pooled.backward(grad)
    assert max(billion.identity_gaps(layer, grad, pooled.detach()).values()) < 1e-9
    for rows, name in ((slice(32, 64), "query_key_gap"), (slice(64, 96), "value_output_gap")):
        layer.projection.weight.grad[rows] *= 1.1
        assert billion.identity_gaps(layer, grad, pooled.detach())[name] > 1e-2
    assert billion.identity_gaps(layer, 1.1 * grad, pooled.detach())["loss_gap"] > 1e-2


@pytest.mark.parametrize(("limit", "found"), [(5000, 4864), (1024, 1024), (900, None)])
def test_bisection_finds_the_longest_that_fits(limit: int, found: int | None):
    def attempt(n: int) -> extreme.Attempt:
        if n > limit:
            raise torch.OutOfMemoryError("no more")
        return extreme.Attempt(n, 1e-3, 0, 0.0)

    longest = extreme.longest(attempt, 1024, 256, power=1, most_seconds=10)
    if found is None:
        assert longest.attempt is None or longest.attempt.n <= limit
    else:
        assert longest.attempt.n == found and longest.limited_by == "memory"


def test_a_length_that_would_take_too_long_is_not_tried():
    tried = []

    def attempt(n: int) -> extreme.Attempt:
        tried.append(n)
        return extreme.Attempt(n, n / 1000, 0, 0.0)

    longest = extreme.longest(attempt, 1024, 256, power=2, most_seconds=9)
    assert longest.limited_by == "time" and longest.attempt.n == tried[-1] == 4096


@pytest.mark.parametrize("name", ["dilated", "block-sparse 1 %", "dense flash"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_subject_is_checked_before_it_counts(name: str, direction: str, monkeypatch: pytest.MonkeyPatch):
    subject = extreme.subjects()[name]
    found = extreme.attempt_of(subject, direction, "cpu", heads=2)(1024)
    assert found.n == 1024 and found.error <= 1.0
    wrong = subject._replace(keys=lambda row, head, n: torch.arange(7))
    with pytest.raises(AssertionError, match="times the rounding bound"):
        extreme.attempt_of(wrong, direction, "cpu", heads=2)(1024)


def as_the_kernels_read(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> Tensor:
    """FlexAttention written densely: output and query gradient by the lists of rows, the rest by those of columns."""
    blocks = query.shape[2] // extreme.BLOCK

    def allowed(counts: Tensor, indices: Tensor) -> Tensor:
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        table = torch.zeros(blocks, blocks).scatter_add_(1, indices[0, 0].long(), listed[0, 0].float())
        return table.repeat_interleave(extreme.BLOCK, 0).repeat_interleave(extreme.BLOCK, 1).double()

    assert not block_mask.kv_num_blocks.any() and not block_mask.q_num_blocks.any()
    assert block_mask.kv_indices.shape == block_mask.full_kv_indices.shape
    assert block_mask.q_indices.shape == block_mask.full_q_indices.shape
    by_query = allowed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    by_key = allowed(block_mask.full_q_num_blocks, block_mask.full_q_indices).T
    output = dense_attention(query, key.detach(), value.detach(), by_query)[0]
    others = dense_attention(query.detach(), key, value, by_key)[0]
    return output + others - others.detach()


def test_flex_receives_blocks_by_row_and_by_column(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extreme, "DENSITY", 0.3)
    monkeypatch.setattr(longest_script, "_compiled_flex", lambda: as_the_kernels_read)
    query, key, value, grad = torch.randn(4, 1, 2, 1280, 8, dtype=torch.float64).unbind()
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = longest_script.subjects()["flex 1 %"].backward(*inputs)
    wanted = answer(*inputs, Random(0.3), grad_output=grad)
    assert error(output, wanted.output) < 1e-12
    for got, gradient in zip(torch.autograd.grad(output, inputs, grad), wanted[2:], strict=True):
        assert error(got, gradient) < 1e-12


def test_nothing_is_tried_on_a_device_that_a_subject_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failing = iter([RuntimeError("no such kernel"), torch.AcceleratorError("CUDA error: device-side assert\nmore")])

    def longest(*_: object) -> extreme.Longest:
        raise next(failing)

    monkeypatch.setattr(extreme, "longest", longest)
    out = tmp_path / "extreme.jsonl"
    assert longest_script.main(["--out", str(out), "--device", "cpu"]) == 1
    told = [json.loads(text)["skipped"] for text in out.read_text().splitlines()]
    assert told == [
        "RuntimeError: no such kernel",
        "AcceleratorError: CUDA error: device-side assert; nothing after it was tried",
    ]
    assert list(longest_script.subjects())[-1] == "flex 1 %", (
        "the peer that is compiled on the way may break the device"
    )
