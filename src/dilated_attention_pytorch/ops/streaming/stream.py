"""Attention over sequences that do not fit: final rows reach a sink once and in order, chunk after chunk."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import must, must_be
from ...patterns import Pattern
from ...patterns.base import integer
from ..merge import AttentionOutput
from .executor import Streamer
from .sinks import Sink, as_sink
from .sources import DifferentiableSource, Source, Three, as_source

SECONDS_QUIET = 2.0


class Streamed(NamedTuple):
    """Summary of a stream."""

    begin: int
    end: int
    """Rows `begin` to `end - 1` reached the sink."""
    chunk: int
    seconds: float
    grad_bias: Tensor | None = None
    """Gradient of a bias, in its dtype; of `streamed_gradients` alone."""


def streamed_attention(
    source: Source | Three,
    pattern: Pattern | str,
    sink: object,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    chunk: int | None = None,
    memory_budget: int | None = None,
    begin: int | None = None,
    end: int | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    progress: bool = False,
) -> Streamed:
    """`attention` over a sequence that need not fit in memory, chunk by chunk.

    Args:
        source: tensors (query, key, value), or an object with `n`, `rows(begin, end)` and `keys(tokens)`.
        pattern: keys that each query attends to, as a value or as text for `parse`.
        sink: a tensor (B, H, N, E), a path of a .npy file, a function `take(begin, output, lse)`, or a `Sink`.
        is_causal: also require the key not to come after the query.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        softcap: bound of the scores, see `attention`.
        bias: table by distance, see `attention`; on the device that computes.
        bias_positions: positions of all tokens in the bias, integers (N, axes); token numbers by default.
        chunk: query rows computed at a time; best a multiple of a dilated pattern's segments.
        memory_budget: bytes that chunks may take on the device, when `chunk` is not given; a quarter of what is free on
            a GPU, 1 GiB elsewhere. Memory of the source and the sink comes on top.
        begin: first row to compute; by default where an earlier stream to the same file ended, else 0.
        end: row to stop before; by default the end of the sequence.
        device: where to compute; by default where the source's rows are. Copies to a GPU overlap with computing.
        backend: as for `attention`.
        progress: print progress and remaining time to stderr if the stream takes over two seconds.

    Returns:
        Range of rows written to the sink. An error or Ctrl-C is raised with a note that gives the same range; rows
        already written stay valid.

    >>> import torch
    >>> from dilated_attention_pytorch import attention
    >>> from dilated_attention_pytorch.ops.streaming.stream import streamed_attention
    >>> q, k, v = torch.randn(3, 1, 4, 1000, 16).unbind()
    >>> output = torch.empty(1, 4, 1000, 16)
    >>> streamed_attention((q, k, v), "dilated:64x1,256x4,1024x16", output, chunk=256).end
    1000
    >>> torch.allclose(output, attention(q, k, v, "dilated:64x1,256x4,1024x16"), atol=1e-6)
    True
    """
    terms = softcap, bias, bias_positions
    streamer = Streamer(as_source(source), pattern, is_causal, scale, enable_gqa, device, backend, *terms)
    whole = as_sink(sink)
    end = streamer.n if end is None else integer("end", end, 0)
    if end > streamer.n:
        raise must(f"end must be at most the {streamer.n} tokens of the source", end)
    rows = streamer.chunk_rows(chunk, memory_budget)
    done = started = 0
    began = time.monotonic()
    try:
        first = whole.open(streamer.about)
        done = started = first if begin is None else integer("begin", begin, 0)
        if started > end:
            raise must(f"begin must be at most end, {end}", started)
        report = _Progress(started, end, progress)
        waiting = None
        with torch.no_grad():
            for piece in streamer.chunks(started, end, rows):
                leaving = _Leaving(piece.begin, streamer.forward(piece), streamer, whole)
                # Rows of the next chunk need the memory of these.
                del piece
                if leaving.event is None:
                    done = leaving.finish()
                    leaving = None
                elif waiting is not None:
                    # The device has its next work before the host waits for the last.
                    done = waiting.finish()
                waiting = leaving
                report(done)
            if waiting is not None:
                done = waiting.finish()
        report.close(done)
    except BaseException as error:
        error.add_note(
            f"rows {started} to {done - 1} of {streamer.n} are complete; go on with begin={done}"
            if done > started
            else f"no row was completed; go on with begin={started}"
        )
        raise
    finally:
        whole.close()
    return Streamed(started, done, rows, time.monotonic() - began)


def streamed_gradients(
    source: DifferentiableSource,
    pattern: Pattern | str,
    grad_of: Callable[[int, Tensor, Tensor], Tensor],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    chunk: int | None = None,
    memory_budget: int | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    progress: bool = False,
) -> Streamed:
    """The backward of `streamed_attention`, by a second stream that computes each chunk anew.

    Args:
        source: takes the gradients of the rows it gave. Keys that many chunks see get their sum once.
        pattern: as for the forward, like all that follows.
        grad_of: `grad_of(begin, output, lse)` gives the gradient of these rows of the output, (B, H, m, E).
        is_causal, scale, enable_gqa, softcap, chunk, memory_budget: see `streamed_attention`, like the rest.

    Returns:
        Range of rows, and the gradient of the bias where there is one.
    """
    if not isinstance(source, DifferentiableSource):
        raise must_be("source must have add_gradients and add_key_gradients", type(source).__name__)
    terms = softcap, bias, bias_positions
    streamer = Streamer(source, pattern, is_causal, scale, enable_gqa, device, backend, *terms)
    rows = streamer.chunk_rows(chunk, memory_budget, backward=True)
    report = _Progress(0, streamer.n, progress)
    began = time.monotonic()
    with torch.no_grad():
        for piece in streamer.chunks(0, streamer.n, rows):
            result = streamer.forward(piece)
            grad_output = grad_of(piece.begin, result.output, result.lse)
            grads = streamer.backward(piece, result, grad_output.to(result.output.dtype))
            source.add_gradients(piece.begin, piece.end, *grads)
            report(piece.end)
        streamer.flush()
    report.close(streamer.n)
    grad_bias = None if bias is None or streamer.grad_bias is None else streamer.grad_bias.to(bias.dtype)
    return Streamed(0, streamer.n, rows, time.monotonic() - began, grad_bias)


class _Leaving:
    """A chunk's result on its way to the sink."""

    def __init__(self, begin: int, result: AttentionOutput, streamer: Streamer, sink: Sink) -> None:
        self.begin, self.sink, self.event = begin, sink, None
        self.result = result
        if streamer.device.type == "cuda" and not sink.on_device:
            copies = streamer.copies()
            copies.wait_stream(torch.cuda.current_stream(streamer.device))
            with torch.cuda.stream(copies):
                host = [
                    torch.empty(t.shape, dtype=t.dtype, pin_memory=True, device="cpu").copy_(t, non_blocking=True)
                    for t in result
                ]
                for tensor in result:
                    tensor.record_stream(copies)
                self.event = copies.record_event()
            self.result = AttentionOutput(*host)

    def finish(self) -> int:
        """Write the result to the sink and return the next row."""
        if self.event is not None:
            self.event.synchronize()
        self.sink.write(self.begin, *self.result)
        return self.begin + self.result.lse.shape[2]


class _Progress:
    """Print the progress of a stream to stderr, at most every two seconds and only if `shown`."""

    def __init__(self, begin: int, end: int, shown: bool) -> None:
        self.begin, self.end, self.shown = begin, end, shown
        self.began = self.said = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if not self.shown or now - self.said < SECONDS_QUIET or done == self.begin:
            return
        self.said = now
        rate = (done - self.begin) / (now - self.began)
        left = (self.end - done) / rate
        share = (done - self.begin) / (self.end - self.begin)
        text = f"{share:6.1%} of {self.end - self.begin:,} rows, {rate:,.0f} a second, about {left:,.0f} s left"
        print(f"\r{text}   ", end="", file=sys.stderr, flush=True)

    def close(self, done: int) -> None:
        """End the line, where one was begun."""
        if self.said > self.began:
            print(f"\r{'100.0%' if done == self.end else 'stopped'} of {self.end - self.begin:,} rows", file=sys.stderr)
