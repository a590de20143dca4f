"""Sources of streamed attention: tensors, memory-mapped files, or a function that computes rows."""

from __future__ import annotations

import ast
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...errors import must, must_be
from ...patterns.base import integer
from ..derivatives import check_reverse_mode

Three = tuple[Tensor, Tensor, Tensor]
"""query (B, H, m, D), key (B, G, m, D), value (B, G, m, E)"""

NPY = b"\x93NUMPY"
NPY_DTYPES = {"<f2": torch.float16, "<f4": torch.float32, "<f8": torch.float64}
LONGEST_NPY_HEADER, LONGEST_SAFETENSORS_HEADER = 2**16, 100 * 2**20
_UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, struct.error),
    *(SyntaxError, RecursionError, MemoryError),
)
"""Exceptions of an invalid header; the last three if it is nested too deeply."""
SAFETENSORS_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@runtime_checkable
class Source(Protocol):
    """Provider of query, key and value of a sequence, some rows at a time."""

    n: int
    """Tokens in the sequence."""

    def rows(self, begin: int, end: int) -> Three:
        """Query, key and value of the tokens `begin` to `end - 1`."""
        ...

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Key (B, G, m, D) and value (B, G, m, E) of tokens anywhere, int64 (G, m) on the CPU: a row for a key head."""
        ...


@runtime_checkable
class DifferentiableSource(Source, Protocol):
    """A source that accumulates gradients of its rows. Rows may occur several times; their gradients add."""

    def add_gradients(self, begin: int, end: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Accumulate gradients of the result of `rows(begin, end)`."""
        ...

    def add_key_gradients(self, tokens: Tensor, key: Tensor, value: Tensor) -> None:
        """Accumulate gradients of the result of `keys(tokens)`."""
        ...


class TensorSource:
    """Query (B, H, N, D), key (B, G, N, D) and value (B, G, N, E), on a device, in host memory or mapped from files.

    With `gradients=True`, `streamed_gradients` leaves those of the three in `grads`, in float32 or wider.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, *, gradients: bool = False) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, Tensor):
                raise must_be(f"{name} must be a Tensor", type(tensor).__name__, "Map a file with open_tensor.")
            if tensor.dim() != 4 or tensor.shape[2] != query.shape[2]:
                expected = f"(batch, heads, {query.shape[2] if query.dim() == 4 else 'n'}, width)"
                raise must(f"{name} must have shape {expected}", tuple(tensor.shape))
        check_reverse_mode(query, key, value)
        self.tensors: Three = (query.detach(), key.detach(), value.detach())
        self.n = query.shape[2]
        self.grads: Three | None = None
        if gradients:
            wide = torch.promote_types(query.dtype, torch.float32)
            made = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in self.tensors)
            self.grads = tuple(made)  # pyrefly: ignore[bad-assignment]

    def rows(self, begin: int, end: int) -> Three:
        query, key, value = (t[:, :, begin:end] for t in self.tensors)
        return query, key, value

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        _, key, value = self.tensors
        at = tokens.to(key.device)
        head = torch.arange(len(at), device=key.device)[:, None]
        return key[:, head, at], value[:, head, at]

    def add_gradients(self, begin: int, end: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        for total, grad in zip(self._grads(), (query, key, value), strict=True):
            total[:, :, begin:end] += grad.to(total)

    def add_key_gradients(self, tokens: Tensor, key: Tensor, value: Tensor) -> None:
        for total, grad in zip(self._grads()[1:], (key, value), strict=True):
            for head, own in enumerate(tokens.to(total.device)):
                total[:, head].index_add_(1, own, grad[:, head].to(total))

    def _grads(self) -> Three:
        if self.grads is None:
            raise must("a TensorSource must have gradients=True to accumulate gradients", "gradients=False")
        return self.grads


class FunctionSource:
    """Rows computed on demand: `make(tokens)` returns query, key and value of int64 tokens (m,), on the CPU.

    >>> from dilated_attention_pytorch.ops.streaming.sources import FunctionSource
    >>> table = torch.randn(3, 1, 2, 256, 16)
    >>> source = FunctionSource(10_000_000, lambda tokens: table[:, :, :, tokens * 31 % 256].unbind())
    >>> source.rows(9_999_990, 10_000_000)[0].shape
    torch.Size([1, 2, 10, 16])
    """

    def __init__(self, n: int, make: Callable[[Tensor], Three]) -> None:
        self.n = integer("n", n, 1)
        self.make = make

    def rows(self, begin: int, end: int) -> Three:
        return self.make(torch.arange(begin, end, device="cpu"))

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return own_heads(*self.make(tokens.flatten())[1:], len(tokens))


def own_heads(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Select each head's own tokens from rows computed for all heads: (B, G, G * m, D) -> (B, G, m, D)."""
    key, value = (t.unflatten(2, (heads, -1)).diagonal(dim1=1, dim2=2).movedim(-1, 1) for t in (key, value))
    return key, value


def as_source(source: object) -> Source:
    """Three tensors as a source; a source as it is."""
    if isinstance(source, tuple | list) and len(source) == 3:
        return TensorSource(*source)
    if not isinstance(source, Source):
        raise must_be(
            "source must be (query, key, value) or have n, rows and keys",
            type(source).__name__,
            "See TensorSource, FunctionSource and open_tensor.",
        )
    return source


def open_tensor(path: str | os.PathLike[str], name: str | None = None) -> Tensor:
    """Map a tensor of a .npy or .safetensors file into memory; it is read as it is used, and the file never changes.

    Args:
        path: the file.
        name: which tensor of a .safetensors file; it may have one only when none is given.
    """
    file = Path(path)
    try:
        dtype, shape, at = _safetensors_header(file, name) if file.suffix == ".safetensors" else _npy_header(file)
        if any(type(edge) is not int or edge < 0 for edge in shape):
            raise ValueError(f"its shape is {shape}")
    except _UNREADABLE as error:
        raise must(
            "a mapped file must be a whole .npy or .safetensors file of floats", f"{file.name!r} ({error})"
        ) from None
    size = math.prod(shape) * dtype.itemsize
    if file.stat().st_size < at + size:
        raise must(f"{file.name!r} must hold {at + size:,} bytes", f"{file.stat().st_size:,}", "It was cut short.")
    whole = torch.from_file(str(file), shared=False, size=at + size, dtype=torch.uint8)
    body = whole[at:]
    # Views of wider types must start at a multiple of their size; safetensors promises no more than bytes.
    body = body if body.data_ptr() % dtype.itemsize == 0 else body.clone()
    return body.view(dtype).view(shape)


def _npy_header(file: Path) -> tuple[torch.dtype, tuple[int, ...], int]:
    with file.open("rb") as stream:
        if stream.read(6) != NPY:
            raise ValueError("it begins differently")
        major = stream.read(2)[0]
        (length,) = struct.unpack("<H", stream.read(2)) if major == 1 else struct.unpack("<I", stream.read(4))
        header = ast.literal_eval(_header(stream, length, LONGEST_NPY_HEADER).decode("latin1"))
        if header["fortran_order"]:
            raise ValueError("its last dimension is not contiguous")
        return NPY_DTYPES[header["descr"]], tuple(header["shape"]), stream.tell()


def _header(stream: BinaryIO, length: int, longest: int) -> bytes:
    if length > longest:
        raise ValueError(f"its header would have {length:,} bytes")
    header = stream.read(length)
    if len(header) < length:
        raise ValueError("it ends within its header")
    return header


def npy_header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The first bytes of a .npy file."""
    descr = next(text for text, own in NPY_DTYPES.items() if own == dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    # The array starts at a multiple of 64 bytes.
    text += " " * (-(len(NPY) + 4 + len(text) + 1) % 64) + "\n"
    return NPY + b"\x01\x00" + struct.pack("<H", len(text)) + text.encode("latin1")


def _safetensors_header(file: Path, name: str | None) -> tuple[torch.dtype, tuple[int, ...], int]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(_header(stream, length, LONGEST_SAFETENSORS_HEADER))
    header.pop("__metadata__", None)
    if name is None and len(header) != 1:
        raise ValueError(f"name one of {', '.join(sorted(header))}")
    about = header[next(iter(header)) if name is None else name]
    begin, end = about["data_offsets"]
    dtype, shape = SAFETENSORS_DTYPES[about["dtype"]], tuple(about["shape"])
    if type(begin) is not int or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("its offsets do not fit its shape")
    return dtype, shape, 8 + length + begin
