"""A whole attention layer over token ids of any number: only the ids must be in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import must, must_be
from ..ops.derivatives import once_differentiable
from ..ops.streaming.sinks import Sink, StreamShape, as_sink
from ..ops.streaming.sources import Three, own_heads
from ..ops.streaming.stream import Streamed, streamed_attention, streamed_gradients
from ..patterns import Pattern, as_pattern
from ..patterns.base import integer

DIGIT = 1024
"""Positions are written with digits of this base."""

Observer = Callable[[int, Tensor, Tensor], None]
"""Called with (begin, output, lse) of every chunk of attention rows."""


class StreamedLayer(nn.Module):
    """Embedding, projections, attention and output projection over ids that fit in memory while their rows do not.

    A token's vector is the row of its id plus, for each digit of its position in base 1024, a row of that digit's
    table: exact at any length. The result is the mean of all output rows, differentiable; `write` streams the rows.

    Args:
        embed_dim: width of a token's vector.
        num_heads: heads; they divide the width.
        pattern: keys that each query attends to, as a value or as text for `parse`.
        vocabulary: number of ids.
        max_tokens: longest sequence; determines the number of digits of positions.
        is_causal: also require the key not to come after the query.
        softcap: bound of the scores, see `attention`.
        bias: initial value (num_heads, 2 * R + 1) of the parameter `bias`, a table by distance, see `attention`.
        backend: as for `attention`.
        device: device of the parameters and of the computation.
        dtype: dtype of the parameters and of all rows.

    >>> import torch
    >>> from dilated_attention_pytorch.nn.streamed import StreamedLayer
    >>> layer = StreamedLayer(32, 2, "dilated:64x1,256x4,1024x16")
    >>> layer(torch.randint(256, (1000,), dtype=torch.uint8), chunk=256).shape
    torch.Size([32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Pattern | str,
        *,
        vocabulary: int = 256,
        max_tokens: int = 2**30,
        is_causal: bool = False,
        softcap: float | None = None,
        bias: Tensor | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = integer("embed_dim", embed_dim, 1), integer("num_heads", num_heads, 1)
        if embed_dim % num_heads:
            raise must(f"embed_dim must be a multiple of num_heads {num_heads}", embed_dim)
        self.pattern = as_pattern(pattern)
        self.max_tokens = integer("max_tokens", max_tokens, 1)
        self.is_causal, self.softcap, self.backend = is_causal, softcap, backend
        table = None if bias is None else nn.Parameter(bias.detach().to(device=device, dtype=dtype, copy=True))
        self.register_parameter("bias", table)
        digits = 1
        while DIGIT**digits < self.max_tokens:
            digits += 1
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.tokens = nn.Embedding(integer("vocabulary", vocabulary, 1), embed_dim, **made)
        self.positions = nn.ParameterList(
            torch.empty(min(DIGIT, self.max_tokens), embed_dim, **made) for _ in range(digits)
        )
        self.projection = nn.Linear(embed_dim, 3 * embed_dim, bias=False, **made)
        self.output = nn.Linear(embed_dim, embed_dim, bias=False, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise all parameters, so that rows and scores have unit variance."""
        share = (1 + len(self.positions)) ** -0.5
        for table in (self.tokens.weight, *self.positions):
            nn.init.normal_(table, std=share)
        for linear in (self.projection, self.output):
            nn.init.normal_(linear.weight, std=self.embed_dim**-0.5)

    def forward(
        self,
        ids: Tensor,
        *,
        chunk: int | None = None,
        memory_budget: int | None = None,
        progress: bool = False,
        observe: Observer | None = None,
    ) -> Tensor:
        """The mean of the layer's output rows, (embed_dim,), float32 or wider.

        Its backward streams a second time, computing each chunk anew; parameters that need no gradient cost nothing.

        Args:
            ids: integers (N,), on any device.
            chunk, memory_budget, progress: as for `streamed_attention`.
            observe: called with `(begin, output, lse)` of every chunk of attention, before the output projection.
        """
        stream = {"chunk": chunk, "memory_budget": memory_budget, "progress": progress, **self._attention()}
        return _Pooled.apply(self, self._checked(ids), stream, observe, *self.parameters())  # pyrefly: ignore

    @torch.no_grad()
    def write(
        self,
        ids: Tensor,
        sink: object,
        *,
        chunk: int | None = None,
        memory_budget: int | None = None,
        begin: int | None = None,
        end: int | None = None,
        progress: bool = False,
    ) -> Streamed:
        """Stream the output rows to a sink of shape (1, 1, N, embed_dim); see `streamed_attention`."""
        source = TokenSource(self, self._checked(ids))
        rows = _Projected(self, as_sink(sink))
        stream: dict[str, Any] = {"chunk": chunk, "memory_budget": memory_budget, "progress": progress}
        return streamed_attention(source, self.pattern, rows, begin=begin, end=end, **stream, **self._attention())

    def _attention(self) -> dict[str, Any]:
        """Arguments of attention besides the pattern."""
        return {"is_causal": self.is_causal, "softcap": self.softcap, "bias": self.bias, "backend": self.backend}

    def _checked(self, ids: Tensor) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.is_floating_point() or not len(ids):
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise must_be("ids must be integers of shape (n,)", got)
        if len(ids) > self.max_tokens:
            raise must(
                f"ids must be at most {self.max_tokens} tokens", len(ids), "Make the layer with more max_tokens."
            )
        return ids

    def embed(self, ids: Tensor, positions: Tensor | int) -> Tensor:
        """Vectors (m, embed_dim) of ids (m,) at int64 positions (m,), or one after another from a position on."""
        rows = F.embedding(ids.int(), self.tokens.weight)
        low, *higher = self.positions
        if isinstance(positions, int):
            if positions % DIGIT == 0 and len(ids) % DIGIT == 0 and len(low) == DIGIT:
                # Rows that differ in the lowest digit alone share the sum of the others: no table is read row by row.
                first = torch.arange(positions, positions + len(ids), DIGIT, device=rows.device)
                rows = rows.unflatten(0, (-1, DIGIT)) + low
                return (rows + self._higher(higher, first)[:, None] if higher else rows).flatten(0, 1)
            positions = torch.arange(positions, positions + len(ids), device=rows.device)
        rows = rows + F.embedding(positions % DIGIT, low)
        return rows + self._higher(higher, positions) if higher else rows

    def _higher(self, tables: list[Tensor], positions: Tensor) -> Tensor:
        digits = (F.embedding(positions // DIGIT**digit % DIGIT, table) for digit, table in enumerate(tables, 1))
        return reduce(torch.add, digits)

    def heads(self, rows: Tensor) -> Three:
        """Query, key and value (1, H, m, D) of vectors (m, embed_dim), heads inside tokens."""
        query, key, value = (self._head_rows(rows, weight) for weight in self.projection.weight.chunk(3))
        return query, key, value

    def keys(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value alone."""
        key, value = (self._head_rows(rows, weight) for weight in self.projection.weight.chunk(3)[1:])
        return key, value

    def _head_rows(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.linear(rows, weight).view(1, len(rows), self.num_heads, -1).transpose(1, 2)

    def project(self, attended: Tensor) -> Tensor:
        """Output rows (m, embed_dim) of attention rows (1, H, m, D)."""
        return self.output(attended[0].transpose(0, 1).flatten(1))

    def extra_repr(self) -> str:
        return f"{self.pattern.describe()}, {self.num_heads} heads, up to {self.max_tokens:,} tokens"


class TokenSource:
    """Query, key and value of token ids under a layer, computed on demand; accumulates parameter gradients."""

    def __init__(self, layer: StreamedLayer, ids: Tensor) -> None:
        self.layer, self.ids, self.n = layer, ids, len(ids)
        self.device = layer.tokens.weight.device
        self.grads: dict[nn.Parameter, Tensor] = {}

    def rows(self, begin: int, end: int) -> Three:
        return self.layer.heads(self.layer.embed(self.ids[begin:end].to(self.device), begin))

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        positions = tokens.flatten()
        ids = self.ids[positions.to(self.ids.device)].to(self.device)
        return own_heads(*self.layer.keys(self.layer.embed(ids, positions.to(self.device))), len(tokens))

    def add_gradients(self, begin: int, end: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        with torch.enable_grad():
            self.add(self.rows(begin, end), (query, key, value))

    def add_key_gradients(self, tokens: Tensor, key: Tensor, value: Tensor) -> None:
        with torch.enable_grad():
            self.add(self.keys(tokens), (key, value))

    def add(self, made: tuple[Tensor, ...], grads: tuple[Tensor, ...], also: tuple[Tensor, ...] = ()) -> list[Tensor]:
        """Add the gradients of the parameters that `made` depends on, in float32 or wider; return those of `also`."""
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        # Tensors computed without a trainable parameter have no graph.
        with_graph = [(t, g.to(t.dtype)) for t, g in zip(made, grads, strict=True) if t.requires_grad]
        if not with_graph:
            return []
        outputs, seeds = zip(*with_graph, strict=True)
        every = torch.autograd.grad(outputs, [*also, *parameters], seeds, allow_unused=True)
        for parameter, grad in zip(parameters, every[len(also) :], strict=True):
            if grad is not None:
                wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
                self.grads[parameter] = wide + self.grads[parameter] if parameter in self.grads else wide
        return list(every[: len(also)])


class _Projected:
    """Hands output rows on to another sink."""

    on_device = True

    def __init__(self, layer: StreamedLayer, sink: Sink) -> None:
        self.layer, self.sink = layer, sink

    def open(self, about: StreamShape) -> int:
        shape = (1, 1, about.shape[2], self.layer.embed_dim)
        return self.sink.open(about._replace(shape=shape, what=f"{self.layer} {about.what}"))

    def write(self, begin: int, output: Tensor, lse: Tensor) -> None:
        self.sink.write(begin, self.layer.project(output)[None, None], lse)

    def close(self) -> None:
        self.sink.close()


class _Pooled(torch.autograd.Function):
    """The mean of the output rows, as a function of the parameters."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        layer: StreamedLayer,
        ids: Tensor,
        stream: dict[str, Any],
        observe: Observer | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.ids, ctx.stream = layer, ids, stream
        source = TokenSource(layer, ids)
        wide = torch.promote_types(layer.output.weight.dtype, torch.float32)
        total = torch.zeros(layer.embed_dim, dtype=wide, device=source.device)

        def take(begin: int, output: Tensor, lse: Tensor) -> None:
            total.add_(layer.project(output).sum(0, dtype=wide))
            if observe is not None:
                observe(begin, output, lse)

        streamed_attention(source, layer.pattern, take, **stream)
        return total / len(ids)

    @staticmethod
    @once_differentiable("StreamedLayer")
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        layer: StreamedLayer = ctx.layer
        source = TokenSource(layer, ctx.ids)
        # Of the sum, and divided at the end: a row's share of the mean may be too small for its dtype.
        seed = grad_outputs[0]

        def grad_of(begin: int, output: Tensor, lse: Tensor) -> Tensor:
            with torch.enable_grad():
                attended = output.detach().requires_grad_()
                pooled = layer.project(attended).sum(0, dtype=seed.dtype)
                return source.add((pooled,), (seed,), (attended,))[0]

        summary = streamed_gradients(source, layer.pattern, grad_of, **ctx.stream)
        if layer.bias is not None and summary.grad_bias is not None:
            source.grads[layer.bias] = summary.grad_bias
        sums = (source.grads.get(parameter) for parameter in layer.parameters())
        shares = (None if grad is None else grad / len(ctx.ids) for grad in sums)
        grads = (g if g is None else g.to(p.dtype) for g, p in zip(shares, layer.parameters(), strict=True))
        return None, None, None, None, *grads
