"""Every file the library reads: cut short, damaged, foreign, hostile. Every file it writes: whole or as it was."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dilated_attention_pytorch import attention
from dilated_attention_pytorch.atomic_write import write_whole
from dilated_attention_pytorch.kernels.cpu import native
from dilated_attention_pytorch.models import read_state
from dilated_attention_pytorch.models.checkpoints import read_with_facts, write_state
from dilated_attention_pytorch.nn import calibration as tuning
from dilated_attention_pytorch.ops.explain import explain
from dilated_attention_pytorch.ops.streaming.sinks import FileSink
from dilated_attention_pytorch.ops.streaming.sources import npy_header, open_tensor
from dilated_attention_pytorch.ops.streaming.stream import streamed_attention
from dilated_attention_pytorch.tools.bench import runner as bench
from dilated_attention_pytorch.tools.bench.results import read_lines

DEEP = "[" * 200_000


def npy(shape="(1, 1, 4, 4)", descr="<f4", rows=16):
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + bytes(4 * rows)


def safetensors(header, rows=16):
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + bytes(4 * rows)


def tensor_header(**changes):
    return {"rows": {"dtype": "F32", "shape": [1, 1, 4, 4], "data_offsets": [0, 64]} | changes}


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


MAPPED = {
    "nothing.npy": b"",
    "magic-alone.npy": b"\x93NUMPY",
    "half-a-header.npy": npy()[:20],
    "half-the-rows.npy": npy()[:-8],
    "negative.npy": npy("(1, 1, -4, 4)"),
    "fractional.npy": npy("(1, 1, 4.0, 4)"),
    "words.npy": npy("'abcd'"),
    "objects.npy": npy(descr="|O"),
    "integers.npy": npy(descr="<i8"),
    "code.npy": npy("__import__('os').getcwd()"),
    "deep.npy": npy("(" * 9000),
    "endless-header.npy": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{",
    "larger-than-any-disk.npy": npy("(1, 1, 1152921504606846976, 4)"),
    "nothing.safetensors": b"",
    "half-a-length.safetensors": b"\x10\x00\x00",
    "half-a-header.safetensors": safetensors(tensor_header())[:30],
    "half-the-rows.safetensors": safetensors(tensor_header())[:-8],
    "a-list.safetensors": safetensors([1, 2]),
    "a-number.safetensors": safetensors(b"7"),
    "not-json.safetensors": safetensors(b"{rows}"),
    "not-text.safetensors": safetensors(b'{"\xff": 1}'),
    "deep.safetensors": safetensors(DEEP.encode()),
    "two-tensors.safetensors": safetensors(tensor_header() | {"more": tensor_header()["rows"]}),
    "no-offsets.safetensors": safetensors({"rows": {"dtype": "F32", "shape": [4]}}),
    "before-the-rows.safetensors": safetensors(tensor_header(data_offsets=[-64, 0])),
    "overlong.safetensors": safetensors(tensor_header(data_offsets=[0, 65])),
    "fractional.safetensors": safetensors(tensor_header(data_offsets=[0.0, 64.0])),
    "negative.safetensors": safetensors(tensor_header(shape=[-1, -1, 4, 4])),
    "integers.safetensors": safetensors(tensor_header(dtype="I64")),
    "endless-header.safetensors": struct.pack("<Q", 2**63) + b"{}",
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_file_that_is_none_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(MAPPED[name])
    with pytest.raises(ValueError, match="must"):
        open_tensor(path)


@pytest.mark.parametrize("name", ["rows.npy", "rows.safetensors"])
def test_a_pickle_is_not_opened(tmp_path, name):
    path, mark = tmp_path / name, tmp_path / "mark"
    path.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match="must"):
        open_tensor(path)
    assert not mark.exists()


def damaged(data, whole: bytes) -> bytes:
    """The file cut off somewhere, with up to three bytes of it changed."""
    body = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    return bytes(body)


@settings(max_examples=60)
@given(data=st.data())
def test_no_damage_to_a_mapped_file_escapes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("mapped") / data.draw(st.sampled_from(["rows.npy", "rows.safetensors"]))
    whole = npy() if path.suffix == ".npy" else safetensors(tensor_header())
    body = damaged(data, whole)
    path.write_bytes(body)
    try:
        rows = open_tensor(path)
    except ValueError as error:
        assert "must" in str(error)
    else:
        assert rows.numel() * rows.element_size() <= len(body)


@settings(max_examples=60)
@given(data=st.data())
def test_no_damage_to_a_checkpoint_escapes(tmp_path_factory, data):
    """It is refused, or holds tensors whose numbers alone were changed."""
    path = tmp_path_factory.mktemp("states") / data.draw(st.sampled_from(["state.safetensors", "state.pt"]))
    write_state({"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(3)}, path, {"step": 3})
    path.write_bytes(damaged(data, path.read_bytes()))
    try:
        state, _ = read_with_facts(path, "step")
    except (ValueError, TypeError) as error:
        assert "a checkpoint must" in str(error)
    else:
        assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())


@pytest.mark.parametrize("fact", ["[" * 200_000, "{", "\x00"], ids=["deep", "half", "not json"])
def test_a_fact_that_is_no_json_is_refused(tmp_path, fact):
    path = tmp_path / "state.safetensors"
    save_file({"weight": torch.ones(3)}, path, {"step": fact})
    with pytest.raises(ValueError, match="a checkpoint must be a whole safetensors file"):
        read_with_facts(path, "step")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
"""Whatever JSON can say."""


@settings(max_examples=60)
@given(lines=st.lists(ANYTHING.map(json.dumps) | st.text(max_size=30), max_size=6), tail=st.binary(max_size=20))
def test_no_file_of_results_escapes(tmp_path_factory, lines, tail):
    path = tmp_path_factory.mktemp("results") / "lines.jsonl"
    path.write_bytes("\n".join([*lines, '{"case": "window"}', ""]).encode() + tail)
    found = read_lines([path], lambda _: None)
    assert {"case": "window"} in found
    assert all(isinstance(line, dict) for line in found)


@settings(max_examples=60)
@given(told=ANYTHING, figures=ANYTHING)
def test_no_figures_escape(tmp_path_factory, told, figures):
    folder = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        path = tuning.cache_path()
        path.parent.mkdir(parents=True)
        for body in (told, {"a machine": figures}):
            path.write_text(json.dumps(body))
            for model in tuning.stored_models().values():
                assert tuning._is_sane(model)


@settings(max_examples=40)
@given(data=st.data(), told=ANYTHING)
def test_no_marker_of_a_stream_escapes(tmp_path_factory, data, told):
    """It is refused, or the rows that are missing are computed."""
    source, path = rows_of(), tmp_path_factory.mktemp("stream") / "out.npy"
    streamed_attention(source, "window:4", FileSink(path), chunk=32)
    whole, marker = path.read_bytes(), path.with_name("out.npy.progress")
    known = json.loads(marker.read_text())
    name = data.draw(st.sampled_from(["about", "begin", "end", None]))
    marker.write_text(json.dumps(told if name is None else known | {name: told}))
    try:
        streamed_attention(source, "window:4", FileSink(path, resume=True), chunk=32)
    except ValueError as error:
        assert "must" in str(error)
    else:
        assert path.read_bytes() == whole


DAMAGED_COSTS = {
    "empty": "",
    "half": '{"cpu": {"dense_call": 1e-4',
    "deep": DEEP,
    "a list": "[1, 2]",
    "words": {"dense_call": "fast", "dense_tile": 1.0, "sparse_call": 1.0, "sparse_tile": 1.0},
    "not a number": {"dense_call": float("nan"), "dense_tile": 1.0, "sparse_call": 1.0, "sparse_tile": 1.0},
    "negative": {"dense_call": 1.0, "dense_tile": -1.0, "sparse_call": 1.0, "sparse_tile": 1.0},
    "something else": {"dense_call": 1.0, "dense_tile": 1.0, "sparse_call": 1.0, "sparse_tile": 1.0, "more": 1},
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", DAMAGED_COSTS)
def test_damaged_figures_are_as_if_there_were_none(monkeypatch, tmp_path, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DAP_CALIBRATE", "0")
    path = tuning.cache_path()
    path.parent.mkdir(parents=True)
    body = DAMAGED_COSTS[name]
    body = json.dumps({tuning._key(torch.device("cpu")): body}) if isinstance(body, dict) else body
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    assert not tuning.cost_model().measured


def test_figures_that_cannot_be_written_leave_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DAP_CALIBRATE", "1")
    monkeypatch.setattr(tuning, "measure", lambda device: tuning.UNMEASURED)

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    assert tuning.cost_model() == tuning.UNMEASURED
    assert list(tuning.cache_path().parent.iterdir()) == []


def rows_of(n=64):
    return torch.randn(3, 1, 2, n, 8).unbind()


@pytest.mark.parametrize(
    "marker",
    [
        "",
        "{",
        DEEP,
        "[1]",
        '{"about": 1}',
        '{"about": 1, "begin": "a", "end": 2}',
        '{"about": 1, "begin": 0, "end": -2}',
    ],
    ids=["empty", "half", "deep", "a list", "no rows", "words", "negative"],
)
def test_a_damaged_marker_is_not_resumed(tmp_path, marker):
    source, path = rows_of(), tmp_path / "out.npy"
    streamed_attention(source, "window:4", FileSink(path), chunk=32)
    path.with_name("out.npy.progress").write_text(marker)
    with pytest.raises(ValueError, match=r"'out.npy.progress' must be what a stream wrote"):
        streamed_attention(source, "window:4", FileSink(path, resume=True), chunk=32)


def test_rows_that_were_cut_off_are_not_taken_for_written(tmp_path):
    source, path = rows_of(), tmp_path / "out.npy"
    streamed_attention(source, "window:4", FileSink(path), chunk=32)
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(ValueError, match=r"'out.npy' must hold .* bytes"):
        streamed_attention(source, "window:4", FileSink(path, resume=True), chunk=32)


def test_foreign_library_is_refused_and_another_backend_runs(monkeypatch, tmp_path):
    """Another shared library under the name of the kernel's."""
    foreign = tmp_path / "native.so"
    loaded = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    foreign.write_bytes(Path(next(path for path in sorted(loaded) if "/libc.so" in path)).read_bytes())
    monkeypatch.setattr(native, "library_path", lambda: foreign)
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    query = torch.randn(1, 1, 20, 8)
    assert str(explain(query, query, query, "causal")["native"]).startswith("cannot be loaded (")
    assert attention(query, query, query, "causal").isfinite().all()


def test_a_header_is_what_torch_and_numpy_expect(tmp_path):
    path = tmp_path / "rows.npy"
    path.write_bytes(npy_header(torch.float32, (1, 1, 4, 4)) + bytes(64))
    assert open_tensor(path).shape == (1, 1, 4, 4)


def test_a_checkpoint_that_wraps_itself_is_refused(tmp_path):
    endless: dict[str, object] = {}
    endless["model"] = endless
    torch.save(endless, tmp_path / "endless.pt")
    with pytest.raises(ValueError, match="tensors by name"):
        read_state(tmp_path / "endless.pt")


def test_deeply_nested_results_are_skipped(tmp_path):
    file = tmp_path / "deep.jsonl"
    file.write_text("[" * 200_000 + "\n" + '{"case": "window"}\n{"case": "cut')
    told: list[str] = []
    assert read_lines([file], told.append) == bench.known_lines(file) == [{"case": "window"}]
    assert [line.split(":")[1] for line in told] == ["1", "3"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_writing_a_file_leaves_the_umask_alone(monkeypatch, tmp_path, mask):
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail("the umask belongs to the whole process"))
            write_whole(tmp_path / "file", lambda temporary: Path(temporary).write_text("text"))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
