"""Streamed attention: the rows of the whole computation, whatever the chunks, sources, sinks and faults."""

from __future__ import annotations

import errno
import json
import os
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cases import BY_NAME, PROBLEMS, Inputs, Problem
from oracle import answer, bias_of_pairs, error, table_gradient

from dilated_attention_pytorch import Dilated, attention_with_lse, parse
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.nn.streamed import StreamedLayer
from dilated_attention_pytorch.ops.streaming import executor as streamer
from dilated_attention_pytorch.ops.streaming.sinks import FileSink, TensorSink
from dilated_attention_pytorch.ops.streaming.sources import FunctionSource, TensorSource, open_tensor
from dilated_attention_pytorch.ops.streaming.stream import streamed_attention, streamed_gradients
from dilated_attention_pytorch.plan.buffers import excerpts

UNPADDED = [problem for problem in PROBLEMS if not problem.padded]
LADDER = "dilated:16x1,64x4,256x16"
CPU_BACKENDS = ["cpu", *(["native"] if library_path().exists() else [])]


def three(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.query, inputs.key, inputs.value


def ladder_problem(n: int = 300, causal: bool = False) -> Problem:
    return Problem(name="ladder", text=f"{LADDER} & causal" if causal else LADDER, n=n, heads=4, key_heads=4)


@pytest.mark.parametrize("problem", UNPADDED, ids=lambda problem: problem.name)
@pytest.mark.parametrize("few", [streamer.FEW_KEYS, 8], ids=["keys-at-once", "keys-in-stretches"])
def test_rows_and_gradients_are_those_of_the_whole(problem: Problem, few: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streamer, "FEW_KEYS", few)
    inputs = problem.inputs()
    wanted = answer(*three(inputs), problem.pattern, grad_output=inputs.grad_output)
    chunk = problem.n // 2 + 1 if few > 8 else 29
    output, lse = torch.full_like(wanted.output, torch.nan), torch.full_like(wanted.lse, torch.nan)
    source = TensorSource(*three(inputs), gradients=True)
    streamed_attention(source, problem.text, TensorSink(output, lse), chunk=chunk, enable_gqa=True)
    assert error(output, wanted.output) < 1e-10 and error(lse, wanted.lse) < 1e-10

    def grad_of(begin: int, found: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return inputs.grad_output[:, :, begin : begin + found.shape[2]]

    streamed_gradients(source, problem.text, grad_of, chunk=chunk, enable_gqa=True)
    for got, grad in zip(source.grads, wanted[2:], strict=True):
        assert error(got, grad) < 1e-10


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("text", ["dilated:58x3", "dilated:58x3 & causal", "window:20", "dilated:32x4,96x8"])
@pytest.mark.parametrize(("size", "softcap"), [(1.0, None), (1000.0, None), (1.0, 0.7), (1000.0, 20.0)])
def test_short_chunks_have_the_gradients_of_the_whole(text: str, size: float, softcap: float | None, backend: str):
    # Chunks of 8 rows leave most of a tile to filler; large logits make a weight overflow where filler has one.
    problem = Problem(name=text, text=text, n=129, heads=2, key_heads=2, d=4, e=4)
    inputs = problem.inputs()
    query, key = inputs.query * size, inputs.key
    wanted = answer(query, key, inputs.value, problem.pattern, grad_output=inputs.grad_output, softcap=softcap)
    source = TensorSource(query, key, inputs.value, gradients=True)
    output = torch.empty_like(wanted.output)
    streamed_attention(source, text, output, chunk=8, backend=backend, softcap=softcap)
    assert error(output, wanted.output) < 1e-9

    def grad_of(begin: int, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return inputs.grad_output[:, :, begin : begin + output.shape[2]]

    streamed_gradients(source, text, grad_of, chunk=8, backend=backend, softcap=softcap)
    for got, grad in zip(source.grads, wanted[2:], strict=True):
        assert error(got, grad) < 1e-9


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("widths", "size"), [((41,), 2.0), ((5, 9), 2.0), ((3,), 2000.0)])
@pytest.mark.parametrize("text", ["dilated:58x3,129x7", "dilated:32x4,96x8 & causal", "window:20 | global:3"])
def test_biases_match_dense_in_short_chunks(text: str, widths: tuple[int, ...], size: float, backend: str):
    # Filler rows have scores, too: a large bias makes their weights overflow unless their LSE is as large.
    problem = Problem(name=text, text=text, n=129, heads=4, key_heads=2, d=4, e=4)
    inputs = problem.inputs()
    table = size * torch.randn(4, *widths, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    positions = torch.randint(0, 20, (129, 2)) if len(widths) > 1 else None
    terms = {"bias": table, "bias_positions": positions, "softcap": 1.5}
    options = {"grad_output": inputs.grad_output, "softcap": 1.5}
    wanted = answer(*three(inputs), problem.pattern, bias=bias_of_pairs(table, 129, positions), **options)
    source, output = TensorSource(*three(inputs), gradients=True), torch.empty_like(wanted.output)
    given = {"chunk": 29, "backend": backend, "enable_gqa": True}
    streamed_attention(source, text, output, **given, **terms)
    assert error(output, wanted.output) < 1e-9

    def grad_of(begin: int, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return inputs.grad_output[:, :, begin : begin + output.shape[2]]

    summary = streamed_gradients(source, text, grad_of, **given, **terms)
    options["grad_lse"] = torch.zeros_like(wanted.lse)
    table_grad = table_gradient(*three(inputs), problem.pattern, table, positions, **options)
    for got, grad in zip((*source.grads, summary.grad_bias), (*wanted[2:], table_grad), strict=True):
        assert error(got, grad) < 1e-9


def test_streams_with_another_bias_are_not_continued(tmp_path: Path):
    inputs, path = ladder_problem().inputs(), tmp_path / "rows.npy"
    table = torch.zeros(4, 3)
    streamed_attention(three(inputs), LADDER, path, bias=table, chunk=64, end=64)
    with pytest.raises(ValueError, match="must hold rows of the stream that goes on"):
        streamed_attention(three(inputs), LADDER, FileSink(path, resume=True), bias=table + 1, chunk=64)


@pytest.mark.parametrize("text", ["causal", "full", "dilated:1024x1", "window:400", "random:0.9;block=16"])
def test_no_more_keys_are_held_at_a_time_than_twice_the_chunk(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streamer, "FEW_KEYS", 16)
    inputs = Problem(name=text, text=text, n=1024).inputs()
    most, made = 0, streamer.Streamer._hold

    def noted(self, *arguments):
        nonlocal most
        held = made(self, *arguments)
        most = max(most, held.key.shape[2])
        return held

    monkeypatch.setattr(streamer.Streamer, "_hold", noted)
    output = torch.empty_like(inputs.query)
    streamed_attention(three(inputs), text, output, chunk=128)
    assert 0 < most <= 2 * 128 + 128
    assert error(output, answer(*three(inputs), parse(text)).output) < 1e-10


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [16, 64, 100, 256])
def test_a_stream_equals_the_resident_call_in_float32(chunk: int, causal: bool):
    problem = ladder_problem(n=777)
    inputs = problem.inputs(torch.float32)
    whole = attention_with_lse(*three(inputs), LADDER, is_causal=causal)
    output, lse = torch.empty_like(whole.output), torch.empty_like(whole.lse)
    streamed_attention(three(inputs), LADDER, TensorSink(output, lse), chunk=chunk, is_causal=causal)
    assert error(output, whole.output) < 2e-6 and error(lse, whole.lse) < 2e-6


def test_grouped_heads_of_several_residues_share_a_key_head():
    problem = BY_NAME["dilated-block-offset"]
    inputs = problem.inputs()
    output = torch.empty_like(inputs.query)
    streamed_attention(three(inputs), problem.text, output, chunk=16, enable_gqa=True)
    assert error(output, answer(*three(inputs), problem.pattern).output) < 1e-10


class Counting(TensorSource):
    """Notes which keys are asked for beyond the chunks themselves."""

    def __init__(self, *tensors: torch.Tensor, **options: bool) -> None:
        super().__init__(*tensors, **options)
        self.asked: list[torch.Tensor] = []
        self.ranges: list[tuple[int, int]] = []

    def rows(self, begin: int, end: int):
        self.ranges.append((begin, end))
        return super().rows(begin, end)

    def keys(self, tokens: torch.Tensor):
        self.asked.append(tokens.clone())
        return super().keys(tokens)


@pytest.mark.parametrize("causal", [False, True])
def test_sampled_keys_of_long_segments_are_fetched_once(causal: bool):
    inputs = ladder_problem(n=1024).inputs()
    source = Counting(*three(inputs))
    streamed_attention(source, LADDER, torch.empty_like(inputs.query), chunk=64, is_causal=causal)
    assert source.ranges[1:] == list(pairwise(range(0, 1025, 64)))
    # One branch reaches beyond a chunk: 256 / 16 samples a head and segment, of which each chunk holds 4 itself. A causal
    # chunk sees its own samples and earlier ones, which are in memory still.
    assert bool(source.asked) != causal
    for head in range(0 if causal else 4):
        fetched = torch.cat([tokens[head] for tokens in source.asked])
        assert bool((fetched % 16 == head).all())
        assert len(fetched) <= 4 * (16 - 4) and len(fetched.unique()) == len(fetched)


def test_planning_follows_the_chunk_and_not_the_sequence():
    ladder = Dilated([2048 * 4**i for i in range(11)], [4**i for i in range(11)])
    n = 2**30
    for branch in (Dilated((2**30,), (2**20,)), Dilated((2**25,), (2**14,)), parse("window:1000")):
        parts = excerpts(branch.resolve(n, 8), n, 8, 8, n // 2, n // 2 + 2**15, 128)
        assert sum(part.plan.nbytes + part.key_tokens.numel() * 8 for part in parts) < 30e6
    source = FunctionSource(n, lambda tokens: tuple(torch.sin(tokens.float())[None, None, :, None] for _ in range(3)))
    taken = {}
    streamed_attention(
        source, ladder, lambda begin, output, lse: taken.update({begin: output}), begin=n - 300, chunk=4096
    )
    assert list(taken) == [n - 300] and taken[n - 300].shape == (1, 1, 300, 1)


def test_a_function_and_tensors_give_the_same():
    inputs = ladder_problem().inputs()
    made = FunctionSource(300, lambda tokens: tuple(t[:, :, tokens] for t in three(inputs)))
    first, second = torch.empty_like(inputs.query), torch.empty_like(inputs.query)
    streamed_attention(made, LADDER, first, chunk=64)
    streamed_attention(three(inputs), LADDER, second, chunk=64)
    assert torch.equal(first, second)


@pytest.mark.parametrize("budget", [40_000, 150_000, 10**9])
def test_a_budget_decides_the_chunk_and_cuts_at_segments(budget: int):
    inputs = ladder_problem().inputs()
    output = torch.empty_like(inputs.query)
    done = streamed_attention(three(inputs), LADDER, output, memory_budget=budget)
    one = streamer.Streamer(TensorSource(*three(inputs)), LADDER, False, None, False, None, "auto")
    assert done.chunk == {40_000: 12, 150_000: 48, 10**9: 300}[budget]
    assert done.chunk * one.bytes_a_row() <= budget
    assert error(output, answer(*three(inputs), parse(LADDER)).output) < 1e-10


def test_a_range_alone_is_computed():
    problem = ladder_problem()
    inputs = problem.inputs()
    output = torch.full_like(inputs.query, torch.nan)
    done = streamed_attention(three(inputs), LADDER, output, begin=77, end=203, chunk=64)
    assert (done.begin, done.end) == (77, 203)
    wanted = answer(*three(inputs), problem.pattern).output
    assert error(output[:, :, 77:203], wanted[:, :, 77:203]) < 1e-10
    assert output[:, :, :77].isnan().all() and output[:, :, 203:].isnan().all()


def save(path: Path, tensor: torch.Tensor) -> torch.Tensor:
    import numpy

    numpy.save(path, tensor.numpy())
    return open_tensor(path)


def test_files_in_and_out(tmp_path: Path):
    import numpy

    inputs = ladder_problem().inputs(torch.float32)
    mapped = tuple(save(tmp_path / f"{name}.npy", getattr(inputs, name)) for name in ("query", "key", "value"))
    assert all(torch.equal(one, other) for one, other in zip(mapped, three(inputs), strict=True))
    streamed_attention(mapped, LADDER, tmp_path / "output.npy", chunk=64)
    wanted = torch.empty_like(inputs.query)
    streamed_attention(three(inputs), LADDER, wanted, chunk=64)
    assert numpy.array_equal(numpy.load(tmp_path / "output.npy"), wanted.numpy())
    assert torch.equal(open_tensor(tmp_path / "output.npy"), wanted)


def test_bfloat16_is_written_exactly_and_safetensors_are_read(tmp_path: Path):
    inputs = ladder_problem(n=96).inputs(torch.bfloat16)
    file = tmp_path / "rows.safetensors"
    body, header = b"", {"__metadata__": {"made": "here"}}
    for name in ("query", "key", "value"):
        raw = bytes(getattr(inputs, name).contiguous().view(torch.uint8).flatten().tolist())
        shape = list(getattr(inputs, name).shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    mapped = tuple(open_tensor(file, name) for name in ("query", "key", "value"))
    assert all(torch.equal(one, other) for one, other in zip(mapped, three(inputs), strict=True))
    streamed_attention(mapped, LADDER, tmp_path / "output.npy", chunk=32)
    output = torch.empty_like(inputs.query)
    streamed_attention(three(inputs), LADDER, output, chunk=32)
    assert torch.equal(open_tensor(tmp_path / "output.npy"), output.float())


class Failing(TensorSource):
    """Breaks when a row is asked for."""

    def __init__(self, *tensors: torch.Tensor, at: int, problem: BaseException | None) -> None:
        super().__init__(*tensors)
        self.at, self.problem = at, problem

    def rows(self, begin: int, end: int):
        if end > self.at:
            if self.problem is not None:
                raise self.problem
            end = max(begin, self.at)
        return super().rows(begin, end)


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError("the file is gone"), None])
def test_stream_resumes_from_valid_rows_after_a_fault(tmp_path: Path, problem: BaseException | None):
    inputs = ladder_problem().inputs(torch.float32)
    whole = torch.empty_like(inputs.query)
    streamed_attention(three(inputs), LADDER, whole, chunk=64)
    path = tmp_path / "output.npy"
    kind = ValueError if problem is None else type(problem)
    with pytest.raises(kind) as caught:
        streamed_attention(Failing(*three(inputs), at=150, problem=problem), LADDER, path, chunk=64)
    assert "rows 0 to 127 of 300 are complete; go on with begin=128" in caught.value.__notes__
    assert problem is not None or "query of rows 128 to 191" in str(caught.value)
    assert torch.equal(open_tensor(path)[:, :, :128], whole[:, :, :128])
    done = streamed_attention(three(inputs), LADDER, FileSink(path, resume=True), chunk=64)
    assert (done.begin, done.end) == (128, 300)
    assert torch.equal(open_tensor(path), whole)
    again = streamed_attention(three(inputs), LADDER, FileSink(path, resume=True), chunk=64)
    assert (again.begin, again.end) == (300, 300)


def test_a_full_disk_leaves_a_valid_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inputs = ladder_problem().inputs(torch.float32)
    whole = torch.empty_like(inputs.query)
    streamed_attention(three(inputs), LADDER, whole, chunk=64)
    write, room = os.pwrite, 3 * whole[:, :, :64].numel() * 4

    def limited(file: int, body: memoryview, at: int) -> int:
        nonlocal room
        if len(body) > room:
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            body = body[:room]
        # Less than asked for, as the system may.
        done = write(file, body[: max(1, len(body) - 100)], at)
        room -= done
        return done

    monkeypatch.setattr(os, "pwrite", limited)
    with pytest.raises(OSError, match="No space left") as caught:
        streamed_attention(three(inputs), LADDER, tmp_path / "output.npy", chunk=64)
    monkeypatch.undo()
    done = json.loads((tmp_path / "output.npy.progress").read_text())["end"]
    assert done == 128 and f"go on with begin={done}" in caught.value.__notes__[0]
    assert torch.equal(open_tensor(tmp_path / "output.npy")[:, :, :done], whole[:, :, :done])


def test_a_stream_killed_outright_can_be_resumed(tmp_path: Path):
    inputs = ladder_problem().inputs(torch.float32)
    path = tmp_path / "output.npy"
    child = os.fork()
    if not child:
        # In the child: end at once in the midst of a write, as a kill would.
        write = os.pwrite
        os.pwrite = lambda file, body, at: write(file, body, at) if at < 6000 else os._exit(9)
        try:
            streamed_attention(three(inputs), LADDER, path, chunk=64)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    done = streamed_attention(three(inputs), LADDER, FileSink(path, resume=True), chunk=64)
    assert done.end == 300
    wanted = torch.empty_like(inputs.query)
    streamed_attention(three(inputs), LADDER, wanted, chunk=64)
    assert torch.equal(open_tensor(path), wanted)


@pytest.mark.parametrize(
    "change", [{"pattern": "window:5"}, {"scale": 0.1}, {"softcap": 3.0}, {"is_causal": True}], ids=str
)
def test_a_file_of_another_stream_is_not_resumed(change: dict, tmp_path: Path):
    inputs = ladder_problem().inputs(torch.float32)
    path = tmp_path / "output.npy"
    settings = {"pattern": LADDER, "softcap": 2.0, "chunk": 64}
    streamed_attention(three(inputs), sink=path, end=128, **settings)
    with pytest.raises(ValueError, match="must hold rows of the stream that goes on"):
        streamed_attention(three(inputs), sink=FileSink(path, resume=True), **{**settings, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sink": 3}, "sink must be a tensor"),
        ({"sink": torch.empty(1, 4, 299, 16)}, "output tensor must have shape"),
        ({"sink": "rows.txt"}, "must be named .npy"),
        ({"source": 3}, "source must be"),
        ({"chunk": 64, "memory_budget": 10**6}, "must not both be given"),
        ({"memory_budget": 100}, "memory_budget must hold a row"),
        ({"end": 301}, "end must be at most the 300 tokens"),
        ({"begin": 200, "end": 100}, "begin must be at most end"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"pattern": 3}, "pattern must be a Pattern or text"),
    ],
)
@pytest.mark.untyped
def test_wrong_use_is_told(change: dict, message: str):
    inputs = ladder_problem().inputs(torch.float32)
    given = {"source": three(inputs), "pattern": LADDER, "sink": torch.empty_like(inputs.query)} | change
    with pytest.raises((ValueError, TypeError), match=message):
        streamed_attention(**given)


@pytest.mark.untyped
def test_a_source_of_another_dtype_or_without_gradients_is_told():
    inputs = ladder_problem().inputs(torch.float32)
    odd = FunctionSource(
        300,
        lambda tokens: tuple(
            t[:, :, tokens].to(torch.float32 if tokens[0] < 64 else torch.float64) for t in three(inputs)
        ),
    )
    with pytest.raises(ValueError, match=r"dtype torch.float32, got .* torch.float64"):
        streamed_attention(odd, LADDER, torch.empty_like(inputs.query), chunk=64)
    with pytest.raises(TypeError, match="add_gradients"):
        streamed_gradients(odd, LADDER, lambda begin, output, lse: output)
    with pytest.raises(ValueError, match="gradients=True"):
        streamed_gradients(TensorSource(*three(inputs)), LADDER, lambda begin, output, lse: output)


def test_files_that_are_not_whole_are_told(tmp_path: Path):
    path = tmp_path / "rows.npy"
    save(path, torch.zeros(1, 1, 8, 4))
    body = path.read_bytes()
    path.write_bytes(body[:-4])
    with pytest.raises(ValueError, match="It was cut short"):
        open_tensor(path)
    path.write_bytes(b"rows" + body)
    with pytest.raises(ValueError, match="it begins differently"):
        open_tensor(path)


def test_progress_is_told_with_the_time_left(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    from dilated_attention_pytorch.ops.streaming import stream as streamed

    monkeypatch.setattr(streamed, "SECONDS_QUIET", 0.0)
    inputs = ladder_problem().inputs(torch.float32)
    streamed_attention(three(inputs), LADDER, torch.empty_like(inputs.query), chunk=64, progress=True)
    told = capsys.readouterr().err
    assert "of 300 rows" in told and "s left" in told and told.endswith("100.0% of 300 rows\n")


@pytest.mark.parametrize(("text", "causal"), [(LADDER, False), (LADDER, True), ("window:9 | global:3", True)])
@pytest.mark.parametrize("terms", [{}, {"softcap": 1.5, "bias": torch.linspace(-2, 2, 4 * 31).view(4, 31)}])
def test_a_layer_over_token_ids_is_the_layer_over_all_rows(text: str, causal: bool, terms: dict, tmp_path: Path):
    layer = StreamedLayer(32, 4, text, max_tokens=3000, is_causal=causal, dtype=torch.float64, **terms)
    ids = torch.randint(256, (300,), dtype=torch.uint8)
    pattern = parse(text) & parse("causal") if causal else parse(text)
    query, key, value = layer.heads(layer.embed(ids, torch.arange(300)))
    seed = torch.randn(32, dtype=torch.float64)
    from oracle import dense_attention, multiplicities

    bias = None if layer.bias is None else bias_of_pairs(layer.bias, 300)
    dense = dense_attention(query, key, value, multiplicities(pattern, 300, 4), bias=bias, softcap=terms.get("softcap"))
    rows = layer.project(dense[0])
    wanted = torch.autograd.grad((rows.mean(0) * seed).sum(), list(layer.parameters()))
    pooled = layer(ids, chunk=64)
    assert error(pooled, rows.detach().mean(0)) < 1e-12
    for got, grad in zip(torch.autograd.grad((pooled * seed).sum(), list(layer.parameters())), wanted, strict=True):
        assert error(got, grad) < 1e-12
    layer.write(ids, tmp_path / "rows.npy", chunk=100)
    assert error(open_tensor(tmp_path / "rows.npy")[0, 0], rows.detach()) < 1e-12


@pytest.mark.parametrize(("begin", "end"), [(0, 4096), (3 * 2**20, 3 * 2**20 + 2048), (1024, 1500), (5, 1029)])
def test_a_token_has_the_same_vector_alone_and_in_a_run(begin: int, end: int):
    layer = StreamedLayer(8, 1, LADDER, dtype=torch.bfloat16)
    ids = torch.randint(256, (end - begin,), dtype=torch.uint8)
    run, alone = layer.embed(ids, begin), layer.embed(ids, torch.arange(begin, end))
    assert torch.equal(run, alone) and len(run.unique(dim=0)) == len(run)


def test_a_frozen_layer_has_gradients_of_its_projections_alone():
    layer = StreamedLayer(32, 2, LADDER)
    layer.requires_grad_(False)
    layer.projection.requires_grad_(True)
    layer(torch.randint(256, (200,)), chunk=64).sum().backward()
    with_gradient = [name for name, parameter in layer.named_parameters() if parameter.grad is not None]
    assert with_gradient == ["projection.weight"]


@pytest.mark.untyped
def test_a_layer_tells_what_its_ids_must_be():
    layer = StreamedLayer(32, 2, LADDER, max_tokens=100)
    with pytest.raises(TypeError, match="ids must be integers"):
        layer(torch.zeros(5))
    with pytest.raises(ValueError, match="at most 100 tokens"):
        layer(torch.zeros(101, dtype=torch.uint8))
    with pytest.raises(ValueError, match="multiple of num_heads"):
        StreamedLayer(33, 2, LADDER)
