"""Native CPU backend: a C++ kernel, prebuilt in wheels for Linux and otherwise built at first use.

The kernel is a shared library with a C interface, loaded by ctypes (which releases the GIL). It includes no torch
header, so it builds in seconds and does not depend on torch's ABI. It uses the OpenMP threads of torch, as a second
thread pool would compete for the cores.

Wheels contain a library for each level of instruction sets (`toolchain.LEVELS`). Without a prebuilt library for the
processor, the first call builds one, as does `python -m` with the name of this module.

Environment variables: `CXX` names the compiler, `XDG_CACHE_HOME` the parent of the cache folder, `DAP_NATIVE_BUILD=0`
disables the build at first use, `DAP_NATIVE_PREBUILT=0` the library of the wheel, and `DAP_NATIVE_FLAGS` holds further
compiler flags, such as `-fsanitize=address,undefined`. Flags are part of the file name of the library, so that a
library built with them is loaded only if they are set.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...atomic_write import cache_folder, make_private
from ...plan.plan import Axis, Part
from .. import dropout
from ..call import (
    AttentionCall,
    BiasedGradients,
    Extent,
    Forward,
    Gradients,
    empty_rows,
    key_copies,
    key_sums,
    laid_like,
    wide_copies,
)
from ..sink import scale_by_sink
from . import toolchain

RUNS_OF_ROWS = SOFTCAP = BIAS = True
BUILD = "python -m dilated_attention_pytorch.kernels.cpu.native"
AUTOMATIC = "DAP_NATIVE_BUILD"
PREBUILT = "DAP_NATIVE_PREBUILT"
SLOWER = "attention on the CPU runs on torch operations, several times slower than the C++ kernel"
log = logging.getLogger("dilated_attention_pytorch")
WIDE_BUDGET = 256 * 2**20
"""Most bytes of float32 copies of a half-precision call at a time, unless one key head needs more."""
SPLIT_BUDGET = 2 * 2**30
"""Most bytes of additional dK and dV of a backward, which keep every thread busy."""

_int, _pointer, _real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Match(ctypes.Structure):
    _fields_ = [
        *_fields(_int, "streams rows blocks units rank threads key_stream there_stream"),
        *_fields(_pointer, "queries keys there best"),
    ]


class _Choice(ctypes.Structure):
    _fields_ = [
        *_fields(_int, "streams rows width blocks room local sink causal threads"),
        *_fields(_pointer, "scores own wanted visible indices counts"),
    ]


class _Axis(ctypes.Structure):
    _fields_ = _fields(_int, "rate tiles") + _fields(_pointer, "offset start end")


class _Part(ctypes.Structure):
    _fields_ = [
        ("queries", _Axis),
        ("keys", _Axis),
        *_fields(_pointer, "head_class rows full partial mask order"),
        ("row_count", _int),
    ]


class _Array(ctypes.Structure):
    _fields_ = [("data", _pointer), *_fields(_int, "batch head token")]


class _Bias(ctypes.Structure):
    _fields_ = [
        *_fields(_pointer, "table grad"),
        *_fields(_int, "axes rows width pad"),
        *_fields(_pointer, "query_positions key_positions"),
        *_fields(_int, "positions_batch positions_head"),
    ]


class _Call(ctypes.Structure):
    """The kernel's view of a call; the order of the fields is that of `Call` in native.cpp."""

    _fields_ = [
        *_fields(_int, "batch heads key_heads n d e block threads splits part_count mask_words"),
        *_fields(_real, "scale keep_scale softcap"),
        *_fields(_int, "seed first_stream drop_below"),
        *_fields(_pointer, "parts mask_bits mask_band padding query_positions key_positions"),
        *_fields(_Array, "query key value output lse grad_output grad_lse grad_query"),
        *_fields(_pointer, "grad_key grad_value"),
        ("bias", _Bias),
    ]


class _Portion(NamedTuple):
    """Portion of a call in one run of the kernel: batch entries, key heads, and the query heads that read them."""

    batch: slice
    heads: slice
    key_heads: slice

    def of_queries(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _adjacent(x[self.batch, self.heads].to(dtype))

    def of_keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _adjacent(x[self.batch, self.key_heads].to(dtype))


def why_not(call: AttentionCall) -> str | None:
    """Reason why the C++ kernel cannot run the call, or None; built, it runs every plan, width and floating dtype."""
    return device_problem(call.query.device)


def device_problem(device: torch.device) -> str | None:
    """Reason why the library cannot run on a device, or None."""
    if device.type != "cpu":
        return f"needs a CPU tensor, got {device}"
    if not sys.platform.startswith("linux"):
        return f"runs on Linux, got {sys.platform}; the backend `cpu` computes the same with torch operations"
    try:
        if not os.path.lexists(library_path()):
            return f"not built; the first call builds it where it can, or run `{BUILD}` (needs g++)"
        _library()
    except (OSError, RuntimeError, AttributeError) as error:
        # A missing or unreadable home, a file of another user, or a file that is not a library of this kernel.
        return f"cannot be loaded ({error}); delete it and run `{BUILD}`, or name another place in XDG_CACHE_HOME"
    return None


_first_use = threading.Lock()
_offered = False


def prepare_first_use(call: AttentionCall | None = None) -> bool:
    """Build a missing library, at most once per process, and log the build or the reason against it.

    Returns True if the library was built. Nothing is built inside a pytest test (PYTEST_CURRENT_TEST is set).
    """
    global _offered
    if _offered or (call is not None and call.device.type != "cpu"):
        return False
    with _first_use:
        # Another thread may have built while this one waited.
        if _offered:
            return True
        try:
            return _offer_build()
        finally:
            _offered = True


def _offer_build() -> bool:
    if os.environ.get(AUTOMATIC) == "0" or "PYTEST_CURRENT_TEST" in os.environ:
        log.info("%s: building at first use is off", SLOWER)
        return False
    if not sys.platform.startswith("linux"):
        log.warning("%s: it runs on Linux, got %s; %s=0 turns this line off", SLOWER, sys.platform, AUTOMATIC)
        return False
    compiler, reports = _compiler(), []
    try:
        target = library_path()
        if os.path.lexists(target):
            return False
        make_private(target.parent)
        if not os.access(target.parent, os.W_OK):
            raise OSError(f"{target.parent} cannot be written")
    except (OSError, RuntimeError) as error:
        log.warning("%s: no place for it (%s); name one in XDG_CACHE_HOME", SLOWER, error)
        return False
    if compiler is None:
        log.warning("%s: no C++ compiler; install g++ or name one in CXX, or set %s=0", SLOWER, AUTOMATIC)
        return False
    log.warning("building the C++ kernel for this processor with %s, once; %s=0 turns this off", compiler, AUTOMATIC)
    if build(reports.append):
        log.warning("%s: %s", SLOWER, reports[-1])
        return False
    return True


def workspace(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes besides results; see `registry.Backend`."""
    wide, bias = call.compute_dtype.itemsize, 0
    if call.bias is not None:
        *others, width = call.bias.shape
        table = 8 * math.prod(others) * (width + 2 * call.plan.block_size)
        bias = table if direction == "forward" else table * (2 + key_copies(call) * extent.samples)
    if call.query.dtype.itemsize < wide:
        return wide_copies(call, direction, extent) + bias
    if direction == "forward":
        return 4 * wide * extent.queries + bias
    sums = key_copies(call) * key_sums(call) * extent.keys + bias
    return wide * (call.query.shape[3] + 2) * extent.queries + sums


def forward(call: AttentionCall) -> Forward:
    """Output and LSE; half precision is computed in float32."""
    dtype = call.compute_dtype
    output = empty_rows(call.query, call.value.shape[-1])
    lse = call.query.new_full(call.query.shape[:3], -torch.inf, dtype=dtype)
    for portion in _portions(call, dtype):
        rows, row_lse = output[portion.batch, portion.heads], lse[portion.batch, portion.heads]
        wide = rows if rows.dtype == dtype else rows.new_empty(rows.shape, dtype=dtype)
        if len(call.plan.parts) != 1:
            # A part resumes whole tiles of rows, including rows that no earlier part wrote.
            wide.zero_()
        kernel = _Kernel(call, portion, dtype)
        kernel.give(output=wide, lse=row_lse)
        kernel.run("forward")
        unseen = row_lse == -torch.inf
        if bool(unseen.any()):
            wide[unseen] = 0
        if call.sink is not None:
            scale_by_sink(wide, row_lse, call.sink[portion.heads])
        if wide is not rows:
            rows.copy_(wide)
    return Forward(output, lse)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients in one pass over the rows; reproducible for a fixed number of threads."""
    portions = _portions(call, call.compute_dtype)
    if len(portions) == 1:
        return _backward_portion(call, portions[0], output, lse, grad_output, grad_lse)
    whole = Gradients(*(empty_rows(x, x.shape[-1]) for x in (call.query, call.key, call.value)))
    if call.bias is not None:
        whole = BiasedGradients(*whole, torch.zeros_like(call.bias))
    for portion in portions:
        grads = _backward_portion(call, portion, output, lse, grad_output, grad_lse)
        if isinstance(whole, BiasedGradients) and isinstance(grads, BiasedGradients):
            whole.bias[portion.heads] += grads.bias
        whole.query[portion.batch, portion.heads] = grads.query
        whole.key[portion.batch, portion.key_heads] = grads.key
        whole.value[portion.batch, portion.key_heads] = grads.value
    return whole


def _backward_portion(
    call: AttentionCall, portion: _Portion, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    kernel = _Kernel(call, portion, call.compute_dtype)
    query, key, value = kernel.query, kernel.key, kernel.value
    grad_query = empty_rows(query, query.shape[-1]).zero_()
    splits = range(_splits(kernel))
    bias_sums = None if call.bias is None else kernel.give_bias_sums(len(splits))
    # The kernel adds whole vector registers to the rows of dK and dV, so they are padded to whole registers.
    grad_key, grad_value = ([empty_rows(x, -(-x.shape[3] // 16) * 16).zero_() for _ in splits] for x in (key, value))
    kernel.give(
        output=portion.of_queries(output, query.dtype),
        lse=portion.of_queries(lse, query.dtype),
        grad_output=portion.of_queries(grad_output, query.dtype),
        grad_query=grad_query,
    )
    if grad_lse is not None:
        kernel.give(grad_lse=portion.of_queries(grad_lse, query.dtype))
    kernel.give_copies(grad_key=grad_key, grad_value=grad_value)
    kernel.run("backward")
    for copies in (grad_key, grad_value):
        for copy in copies[1:]:
            copies[0] += copy
    grads = ((grad_query, query), (grad_key[0], key), (grad_value[0], value))
    grads = Gradients(*(laid_like(x[..., : like.shape[3]], like).to(call.query.dtype) for x, like in grads))
    if bias_sums is None:
        return grads
    return BiasedGradients(*grads, _table_of(bias_sums.sum((0, 1)), kernel.call.bias.pad).to(call.compute_dtype))


_MATCHES = {torch.float32: "best_match_float", torch.float64: "best_match_double"}
"""Function of the library by dtype"""


def best_match(queries: Tensor, keys: Tensor, there: Tensor | None) -> Tensor | None:
    """Largest product of each row with the sub-blocks of each block, (b, h, r, t); None if the library cannot run.

    Args:
        queries: (b, h, r, p). The library runs float32 and float64.
        keys: (b, h, t, u, p). The library runs keys of the same dtype.
        there: bool (b, h, t, u), sub-blocks that count; all if None. A block without any gives -inf.
    """
    if queries.dtype != keys.dtype or queries.dtype not in _MATCHES or _cannot_rank(queries.device):
        return None
    best = queries.new_empty(*queries.shape[:3], keys.shape[2])
    # The first blocks of a longer sequence are not copied.
    columns = [(x, 0) if x is None else _dense_streams(x) for x in (keys, there)]
    given = queries.contiguous(), *(x for x, _ in columns), best
    sizes = best.shape[0] * best.shape[1], *best.shape[2:], *keys.shape[3:], torch.get_num_threads()
    match = _Match(*sizes, *(step for _, step in columns), *(None if x is None else x.data_ptr() for x in given))
    getattr(_library(), _MATCHES[best.dtype])(ctypes.byref(match))
    return best


def choose_blocks(
    scores: Tensor, own: Tensor, wanted: Tensor, visible: Tensor, room: int, local: int, sink: int, is_causal: bool
) -> tuple[Tensor, Tensor] | None:
    """Best blocks of rows, int32 (b, h, r, room), ascending, then t; and their counts, int32 (b, h, r).

    Of equal scores the first is chosen; NaN and -inf never are. None if the library cannot run.

    Args:
        scores: float32 (b, h, r, w): scores of the first w blocks.
        own: int64 (r): block of each row.
        wanted: int64 (b, h, r): blocks to choose, at most `room`.
        visible: bool (b, h, t).
        room: length of the lists.
        local: blocks nearer than this to a row's own block are not chosen.
        sink: first blocks that are not chosen.
        is_causal: only blocks before a row's own are chosen.
    """
    if scores.dtype != torch.float32 or _cannot_rank(scores.device):
        return None
    batch, heads, rows, width = scores.shape
    indices, counts = (scores.new_empty(*shape, dtype=torch.int32) for shape in ((*wanted.shape, room), wanted.shape))
    tensors = *(x.contiguous() for x in (scores, own, wanted, visible)), indices, counts
    sizes = batch * heads, rows, width, visible.shape[2], room, local, sink, is_causal, torch.get_num_threads()
    _library().choose_blocks(ctypes.byref(_Choice(*sizes, *(x.data_ptr() for x in tensors))))
    return indices, counts


def _cannot_rank(device: torch.device) -> bool:
    """Whether the library is missing, or transforms or dispatch modes must see torch operators instead of it."""
    is_intercepted = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    return bool(is_intercepted) or device_problem(device) is not None


def _dense_streams(x: Tensor) -> tuple[Tensor, int]:
    """x (b, h, ...), or a copy, dense within each (b, h), and the elements from one (b, h) to the next."""
    batch, heads = x.shape[:2]
    step = x.stride(1) if heads > 1 else x.stride(0)
    if x.numel() and x[0, 0].is_contiguous() and (1 in (batch, heads) or x.stride(0) == heads * step):
        return x, step
    return x.contiguous(), x.shape[2:].numel()


def _adjacent(x: Tensor) -> Tensor:
    return x if x.ndim < 4 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _portions(call: AttentionCall, dtype: torch.dtype) -> list[_Portion]:
    """The whole call; in half precision one key head at a time if float32 copies of the call exceed `WIDE_BUDGET`."""
    batch, heads, _, _ = call.query.shape
    key_heads = call.key.shape[1]
    wide = 8 * (call.query.numel() + call.key.numel() + call.value.numel())
    if call.query.dtype == dtype or wide <= WIDE_BUDGET:
        return [_Portion(slice(batch), slice(heads), slice(key_heads))]
    shared = heads // key_heads
    return [
        _Portion(slice(entry, entry + 1), slice(group * shared, (group + 1) * shared), slice(group, group + 1))
        for entry in range(batch)
        for group in range(key_heads)
    ]


def _splits(kernel: _Kernel) -> int:
    """Number of copies of dK and dV: the fewest with at most a tenth of idle thread time."""
    tasks, threads = kernel.key.shape[0] * kernel.key.shape[1], kernel.call.threads
    bytes_a_copy = (kernel.key.numel() + kernel.value.numel()) * kernel.key.itemsize
    busy = {copies: tasks * copies / (-(-tasks * copies // threads) * threads) for copies in range(1, threads + 1)}
    enough = next(copies for copies, share in busy.items() if share >= 0.9)
    return min(enough, 1 + SPLIT_BUDGET // max(bytes_a_copy, 1))


def _padded_table(table: Tensor, pad: int) -> Tensor:
    """Table by key minus query, indexed by query minus key, with the outermost entries of the last axis repeated."""
    table = table.flip(*range(1, table.dim()))
    first, last = (x.expand(*x.shape[:-1], pad) for x in (table[..., :1], table[..., -1:]))
    return torch.cat([first, table, last], -1)


def _table_of(padded: Tensor, pad: int) -> Tensor:
    """Transpose of `_padded_table`: gradient of a table from that of the padded one."""
    table = padded[..., pad:-pad]
    table[..., 0] += padded[..., :pad].sum(-1)
    table[..., -1] += padded[..., -pad:].sum(-1)
    return table.flip(*range(1, table.dim()))


class _Kernel:
    """One run of the library. It owns a reference to every tensor whose address is passed."""

    def __init__(self, call: AttentionCall, portion: _Portion, dtype: torch.dtype) -> None:
        self.query = portion.of_queries(call.query, dtype)
        self.key, self.value = portion.of_keys(call.key, dtype), portion.of_keys(call.value, dtype)
        self.double = dtype == torch.float64
        self.owned: list[object] = [self.query, self.key, self.value]
        plan, masks = call.plan, call.plan.masks
        batch, heads, n, d = self.query.shape
        first = portion.heads.start or 0
        parts = (_Part * len(plan.parts))(*(self._part(part, first) for part in plan.parts))
        self.owned.append(parts)
        self.call = _Call(
            batch=batch,
            heads=heads,
            key_heads=self.key.shape[1],
            n=n,
            d=d,
            e=self.value.shape[3],
            block=plan.block_size,
            threads=torch.get_num_threads(),
            splits=1,
            part_count=len(plan.parts),
            parts=ctypes.addressof(parts),
            mask_words=masks.bits.shape[2],
            mask_bits=self._address(masks.bits),
            mask_band=self._address(masks.band),
            scale=call.scale,
        )
        self.give(query=self.query, key=self.key, value=self.value)
        self.call.softcap = call.softcap
        if call.bias is not None:
            self._give_bias(call, call.bias[portion.heads], portion)
        if call.key_padding_mask is not None:
            self.call.padding = self._address(call.key_padding_mask[portion.batch])
        if call.dropout_p:
            assert call.seed is not None
            self.call.seed = int(call.seed)
            self.call.first_stream = (portion.batch.start or 0) * call.query.shape[1] + first
            self.call.drop_below = dropout.threshold(call.dropout_p)
            self.call.keep_scale = 1 / (1 - call.dropout_p)
            if call.positions is not None:
                queries, keys = call.positions[:, portion.heads]
                self.call.query_positions, self.call.key_positions = self._address(queries), self._address(keys)

    def give(self, **arrays: Tensor) -> None:
        """Pass (batch, head, token, feature) or (batch, head, token) tensors to the library."""
        for name, x in arrays.items():
            self.owned.append(x)
            setattr(self.call, name, _array(x))

    def _give_bias(self, call: AttentionCall, table: Tensor, portion: _Portion) -> None:
        own, self.table = self.call.bias, table
        *rows, own.width = table.shape[1:]
        own.axes, own.rows = len(rows) + 1, rows[0] if rows else 1
        # The lanes of a query tile are consecutive entries, and may lie beyond the table as a whole.
        own.pad = call.plan.block_size
        own.table = self._address(_padded_table(table, own.pad))
        positions = call.bias_positions
        if positions is not None and positions.dim() == 4:
            queries, keys = positions[:, portion.heads]
            own.query_positions, own.key_positions = self._address(queries), self._address(keys)
            own.positions_head = queries[0].numel()
        elif positions is not None:
            positions = positions[portion.batch] if len(positions) > 1 else positions
            own.query_positions = own.key_positions = self._address(positions)
            own.positions_batch = positions[0].numel() if len(positions) > 1 else 0

    def give_bias_sums(self, splits: int) -> Tensor:
        """Pass zero sums of the bias gradient to the library, and return them."""
        padded = *self.table.shape[1:-1], self.table.shape[-1] + 2 * self.call.bias.pad
        sums = self.table.new_zeros(splits, *self.query.shape[:2], *padded, dtype=torch.float64)
        self.call.bias.grad = sums.data_ptr()
        return sums

    def give_copies(self, **copies: list[Tensor]) -> None:
        """Pass one tensor per split to the library."""
        for name, tensors in copies.items():
            table = (_Array * len(tensors))(*(_array(x) for x in tensors))
            self.owned += [tensors, table]
            setattr(self.call, name, ctypes.addressof(table))
            self.call.splits = len(tensors)

    def run(self, direction: str) -> None:
        getattr(_library(), f"{direction}_{'double' if self.double else 'float'}")(ctypes.byref(self.call))

    def _part(self, part: Part, first_head: int) -> _Part:
        walk = part.by_query
        return _Part(
            queries=self._axis(part.queries, first_head),
            keys=self._axis(part.keys, first_head),
            head_class=self._address(part.head_class[first_head:]),
            rows=self._address(walk.rows),
            full=self._address(walk.full),
            partial=self._address(walk.partial),
            mask=self._address(walk.mask),
            order=self._address(walk.order),
            row_count=len(walk.order),
        )

    def _axis(self, axis: Axis, first_head: int) -> _Axis:
        return _Axis(
            rate=axis.rate,
            tiles=len(axis.start),
            offset=self._address(axis.offset[first_head:]),
            start=self._address(axis.start),
            end=self._address(axis.end),
        )

    def _address(self, x: Tensor) -> int:
        x = x.contiguous()
        self.owned.append(x)
        return x.data_ptr()


def _array(x: Tensor) -> _Array:
    return _Array(x.data_ptr(), *x.stride()[:3])


@functools.cache
def _library() -> ctypes.CDLL:
    # Loading a library runs its code, so it is checked first.
    if (reason := _untrusted(library_path())) is not None:
        raise OSError(reason)
    return _load(library_path())


def _load(path: Path) -> ctypes.CDLL:
    if path == _prebuilt() and (runtime := _openmp_runtime()) is not None:
        # Its symbols become visible to the library of a wheel, which names no OpenMP library.
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    if library.call_bytes() != ctypes.sizeof(_Call):
        raise OSError(f"{path.name} was built from another source")
    return library


def _untrusted(path: Path) -> str | None:
    """Reason why a user other than this one and root could have written a file, or None."""
    own = {path, path.parent, path.resolve().parent}
    for entry in dict.fromkeys((path, *path.parents, *path.resolve().parents)):
        facts = entry.lstat() if entry == path else entry.stat()
        mode = stat.S_IMODE(facts.st_mode)
        if entry == path and not stat.S_ISREG(facts.st_mode):
            return f"expected {entry} to be a regular file"
        if entry in own and facts.st_uid not in (0, os.geteuid()):
            return f"expected {entry} to belong to user {os.geteuid()}, got user {facts.st_uid}"
        # In a sticky folder such as /tmp, only the owner of an entry can replace it.
        writable = mode & 0o022 if entry in own else mode & 0o002 and not mode & stat.S_ISVTX
        if writable:
            return f"expected {entry} to be writable by its owner alone, got mode {mode:o}"
    return None


def _flags() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get("DAP_NATIVE_FLAGS", "")))


@functools.cache
def library_path() -> Path:
    """Path of the library: that of the wheel if it runs here, else that built on this machine."""
    return local_path() if why_not_prebuilt() is not None else _prebuilt()


def why_not_prebuilt() -> str | None:
    """Why the library of a wheel does not run here; None if it does."""
    if os.environ.get(PREBUILT) == "0" or _flags():
        return f"turned off by {'DAP_NATIVE_FLAGS' if _flags() else f'{PREBUILT}=0'}"
    level = toolchain.level_here()
    if level is None:
        return f"no level of {platform.machine()} that wheels are built for runs on this processor"
    if not os.path.lexists(_prebuilt()):
        return "this is a source tree or a pure Python wheel"
    if (reason := _untrusted(_prebuilt())) is not None:
        return reason
    try:
        _load(_prebuilt())
    except (OSError, AttributeError) as error:
        # A damaged file, or a process without OpenMP.
        return f"cannot be loaded ({error})"
    return None


def which_library() -> str:
    """Origin and path of the library in use, for `dap doctor`."""
    reason = why_not_prebuilt()
    if reason is None:
        return f"prebuilt for {platform.machine()} with {toolchain.level_here()}, {library_path()}"
    return f"built on this machine, {library_path()} (none prebuilt: {reason})"


def _prebuilt() -> Path:
    level = toolchain.level_here()
    name = "none" if level is None else toolchain.wheel_name(platform.machine(), level)
    return Path(__file__).with_name(name)


def local_path() -> Path:
    """Path of the library built here; its name is a digest of sources, flags, torch release and processor."""
    flags = toolchain.FLAGS, toolchain.HERE, _flags()
    digest = toolchain.digest_of(flags, torch.__version__, platform.machine(), toolchain.processor_flags())
    return cache_folder() / f"native-{digest}.so"


def _openmp_runtime() -> Path | None:
    """OpenMP library that torch has loaded, under any name (libgomp with a hash, libiomp5)."""
    loaded = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = sorted(path for path in loaded if re.search(r"/lib(gomp|iomp5|omp)[-.\w]*\.so", path))
    return Path(runtimes[0]) if runtimes else None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def build(report: Callable[[str], object] = print) -> int:
    """Compile the library unless it exists, report progress, and return an exit status."""
    try:
        target = local_path()
        make_private(target.parent)
        if os.path.lexists(target) and _untrusted(target) is None:
            report(f"native kernel: already built, {target}")
            return 0
    except (OSError, RuntimeError) as error:
        report(f"native kernel: needs a place to write to ({error}); name one in XDG_CACHE_HOME")
        return 1
    compiler = _compiler()
    if compiler is None:
        report("native kernel: needs g++ (or name a compiler in CXX); the slower backend `cpu` works without it")
        return 1
    runtime = _openmp_runtime()
    report(
        f"native kernel: compiling with {compiler}, threads of {runtime.name if runtime else 'none (single-threaded)'}"
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        linked = Path(folder) / target.name
        try:
            toolchain.build_here(compiler, linked, _flags(), runtime)
        except RuntimeError as error:
            report(f"native kernel: {error}")
            return 1
        linked.chmod(0o600)
        os.replace(linked, target)
    if (reason := _untrusted(target)) is not None:
        report(f"native kernel: built, and not to be trusted there: {reason}; name another place in XDG_CACHE_HOME")
        return 1
    report(f"native kernel: built in {time.perf_counter() - began:.1f} s, {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(build())
