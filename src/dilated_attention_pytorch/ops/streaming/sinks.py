"""Sinks of streamed attention: a tensor, a resumable .npy file, or a function."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...errors import must, must_be
from .sources import NPY_DTYPES, npy_header


class StreamShape(NamedTuple):
    """Shape and dtype of the rows of a stream."""

    shape: tuple[int, int, int, int]
    """(B, H, N, E)"""
    dtype: torch.dtype
    what: str
    """All that decides the numbers besides the source: a stream resumes only what is equal in this."""


@runtime_checkable
class Sink(Protocol):
    """Receiver of finished rows, each once, in order."""

    on_device: bool
    """Whether the sink takes rows on a GPU; otherwise they are copied to pinned memory during the next chunk."""

    def open(self, about: StreamShape) -> int:
        """Prepare for writing and return the first row: 0, or the end of an earlier stream."""
        ...

    def write(self, begin: int, output: Tensor, lse: Tensor) -> None:
        """Take rows from `begin` on: output (B, H, m, E) and the natural logarithm of the denominators (B, H, m)."""
        ...

    def close(self) -> None:
        """Close the sink; called after an error too."""
        ...


class TensorSink:
    """Rows go to their places in a tensor (B, H, N, E), and their LSE to one of shape (B, H, N)."""

    def __init__(self, output: Tensor, lse: Tensor | None = None) -> None:
        self.output, self.lse = output, lse
        self.on_device = output.is_cuda

    def open(self, about: StreamShape) -> int:
        if tuple(self.output.shape) != about.shape:
            raise must(f"the output tensor must have shape {about.shape}", tuple(self.output.shape))
        if self.lse is not None and tuple(self.lse.shape) != about.shape[:3]:
            raise must(f"the lse tensor must have shape {about.shape[:3]}", tuple(self.lse.shape))
        return 0

    def write(self, begin: int, output: Tensor, lse: Tensor) -> None:
        end = begin + output.shape[2]
        self.output[:, :, begin:end] = output.to(self.output)
        if self.lse is not None:
            self.lse[:, :, begin:end] = lse.to(self.lse)

    def close(self) -> None:
        pass


class CallSink:
    """Rows go to `take(begin, output, lse)`, on the device they were computed on."""

    on_device = True

    def __init__(self, take: Callable[[int, Tensor, Tensor], None]) -> None:
        self.take = take

    def open(self, about: StreamShape) -> int:
        return 0

    def write(self, begin: int, output: Tensor, lse: Tensor) -> None:
        self.take(begin, output, lse)

    def close(self) -> None:
        pass


class FileSink:
    """Rows go to a .npy file of shape (B, H, N, E); bfloat16 is written as float32, which holds it exactly.

    The file `<name>.progress` records which rows are valid. It is replaced after the rows have reached the disk,
    so what it says holds after a crash. `resume=True` goes on behind them.
    """

    on_device = False

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path = Path(path)
        if self.path.suffix != ".npy":
            raise must("a file sink must be named .npy", repr(self.path.name))
        self.resume = resume
        self.marker = self.path.with_name(self.path.name + ".progress")
        self.file: int | None = None
        self.begin = self.end = 0

    def open(self, about: StreamShape) -> int:
        dtype = torch.float32 if about.dtype == torch.bfloat16 else about.dtype
        self.dtype = dtype if dtype in NPY_DTYPES.values() else torch.float32
        self.shape = about.shape
        header = npy_header(self.dtype, about.shape)
        self.header, self.about = len(header), [*about.shape, str(about.dtype), about.what]
        self.nbytes = self.header + math.prod(about.shape) * self.dtype.itemsize
        stored = self._stored_range() if self.resume else None
        self.begin, self.end = (0, 0) if stored is None else stored
        exists = stored is not None
        if not exists:
            # The marker of an older file must be removed before that file.
            self.marker.unlink(missing_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | (0 if exists else os.O_TRUNC), 0o666)
        if not exists:
            self._write(header, 0)
            os.truncate(self.file, self.nbytes)
            self._mark()
        return self.end

    def _stored_range(self) -> tuple[int, int] | None:
        if not self.marker.exists() or not self.path.exists():
            return None
        advice = "Delete it, or make the sink with resume=False."
        try:
            stored = json.loads(self.marker.read_text(encoding="utf-8"))
            about, begin, end = stored["about"], stored["begin"], stored["end"]
            if not (type(begin) is type(end) is int and 0 <= begin <= end <= self.shape[2]):
                raise ValueError(f"rows {begin} to {end}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise must(f"{self.marker.name!r} must be what a stream wrote", f"another file ({error})", advice) from None
        if about != self.about:
            raise must(f"{self.path.name!r} must hold rows of the stream that goes on, {self.about}", about, advice)
        if self.path.stat().st_size != self.nbytes:
            raise must(f"{self.path.name!r} must hold {self.nbytes:,} bytes", f"{self.path.stat().st_size:,}", advice)
        return begin, end

    def write(self, begin: int, output: Tensor, lse: Tensor) -> None:
        _, _, n, width = self.shape
        if begin != self.end:
            if self.end > self.begin:
                raise must(f"rows must follow on row {self.end}", begin)
            self.begin = begin
        rows = output.detach().to("cpu", self.dtype).contiguous()
        item = width * self.dtype.itemsize
        for index, strip in enumerate(rows.flatten(0, 1)):
            body = (ctypes.c_char * (strip.numel() * strip.element_size())).from_address(strip.data_ptr())
            self._write(memoryview(body).cast("B"), self.header + (index * n + begin) * item)
        os.fsync(self._opened)
        self.end = begin + rows.shape[2]
        self._mark()

    @property
    def _opened(self) -> int:
        assert self.file is not None
        return self.file

    def _write(self, body: bytes | memoryview, at: int) -> None:
        left = memoryview(body)
        while len(left):
            # A file mapped for writing would end the process when the disk is full; this raises.
            done = os.pwrite(self._opened, left, at)
            left, at = left[done:], at + done

    def _mark(self) -> None:
        beside = self.marker.with_name(self.marker.name + ".part")
        beside.write_text(json.dumps({"about": self.about, "begin": self.begin, "end": self.end}), encoding="utf-8")
        os.replace(beside, self.marker)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


def as_sink(sink: object) -> Sink:
    """A tensor, a path or a function as a sink; a sink as it is."""
    if isinstance(sink, Sink):
        return sink
    if isinstance(sink, Tensor):
        return TensorSink(sink)
    if isinstance(sink, str | os.PathLike):
        return FileSink(sink)
    if callable(sink):
        return CallSink(sink)
    raise must_be("sink must be a tensor, a .npy path, a function or have open, write and close", type(sink).__name__)
