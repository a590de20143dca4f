"""Attention on packed sequences in the layout and argument order of `torch.nn.attention.varlen.varlen_attn`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from ..errors import must, must_be
from ..kernels.call import allows_host_sync
from ..patterns import Pattern, SlidingWindow
from .attention import attention_with_lse
from .checks import require


@runtime_checkable
class WantsLse(Protocol):
    """Request for auxiliary outputs, such as `torch.nn.attention.varlen.AuxRequest`."""

    @property
    def lse(self) -> bool: ...


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    pattern: Pattern | str = "full",
    return_aux: WantsLse | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    memory_budget: int | float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over the pairs that a pattern allows in each of several packed sequences.

    For full, causal and window patterns and their `&`, bounds on the query's GPU stay there: nothing is read back,
    and the call may be captured in a CUDA graph and replayed on other bounds. This needs float16, bfloat16 or float32
    and no `memory_budget`, and takes the backend `triton`. Other calls, such as those of dilated patterns, read the
    bounds on the host, because they shape the plan; pass these bounds on the CPU.

    Args:
        query: (T, H, D).
        key: (T, G, D) with G = H, or a divisor of H when `enable_gqa`.
        value: (T, G, E).
        cu_seq_q: int32 or int64 (sequences + 1), bounds of the sequences from 0 to T. Wrong bounds raise where the
            host reads them; on a GPU see `validate_cu_seqlens`.
        cu_seq_k: the same tensor, or None: keys and queries are the same tokens. Another tensor must hold the same
            values, or an error is raised: by the host, or by the device under `torch.compile` and in a CUDA graph.
        max_q: at least the length of the longest sequence; checked where the host reads the bounds.
        max_k: as `max_q`.
        pattern: keys that a query attends to; applies to each sequence separately.
        return_aux: an object whose `lse` is True to return the LSE as well.
        scale: factor on the scores; 1 / sqrt(D) by default.
        window_size: tokens before and after a query that it attends to, within the pattern; -1 for all. (-1, 0) is
            causal attention, (W, 0) a causal window.
        enable_gqa: let query head h read key head h // (H / G).
        sink: (H,), see `attention`, as `softcap`, `bias`, `bias_positions`, `dropout_p`, `backend` and `memory_budget`.

    Returns:
        (T, H, E), and (T, H) with the LSE if `return_aux.lse`.

    >>> import torch
    >>> q, k, v = torch.randn(3, 100, 4, 16).unbind()
    >>> bounds = torch.tensor([0, 30, 100])
    >>> varlen_attention(q, k, v, bounds, bounds, 70, 70, pattern="dilated:16x1,64x4", window_size=(-1, 0)).shape
    torch.Size([100, 4, 16])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            came = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise must(f"{name} must have shape (tokens, heads, width)", came)
    bounds = _bounds(cu_seq_q, cu_seq_k, min(max_q, max_k))
    before, after = _window(window_size, len(query))
    if before < len(query) or 0 < after < len(query):
        # Text stays text: a compiler traces no parser.
        window = SlidingWindow(before, after)
        pattern = f"({pattern}) & {window.describe()}" if isinstance(pattern, str) else pattern & window
    output, lse = attention_with_lse(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        pattern,
        is_causal=after == 0,
        scale=scale,
        enable_gqa=enable_gqa,
        cu_seqlens=bounds if len(query) else None,
        sink=sink,
        softcap=softcap,
        bias=bias,
        bias_positions=bias_positions,
        dropout_p=dropout_p,
        backend=backend,
        memory_budget=memory_budget,
    )
    output, lse = output[0].transpose(0, 1), lse[0].transpose(0, 1)
    return (output, lse) if return_aux is not None and return_aux.lse else output


def _bounds(queries: Tensor, keys: Tensor | None, longest: int) -> Tensor:
    """Bounds of the sequences: on the CPU, or where the host must not read them on their device."""
    for name, tensor in (("cu_seq_q", queries), ("cu_seq_k", queries if keys is None else keys)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.is_floating_point():
            raise must_be(f"{name} must be a Tensor of integers, (sequences + 1,)", type(tensor).__name__)
    advice = "Queries and keys are the same tokens here; torch.nn.attention.varlen has two lengths."
    if keys is not None and keys.shape != queries.shape:
        raise must("cu_seq_k must equal cu_seq_q", f"{len(keys)} and {len(queries)} bounds", advice)
    stays = not allows_host_sync(queries.device)
    bounds = queries if stays else queries.cpu()
    if keys is not None and keys is not queries:
        same = (keys.to(bounds.device) == bounds).all()
        bounds = require(bounds, same, "cu_seq_k must equal cu_seq_q", lambda: f"{keys.tolist()}", advice)
    if stays:
        return bounds
    fits = (bounds.diff() <= longest).all()
    what = "max_q and max_k must be at least the length of the longest sequence"
    return require(bounds, fits, what, lambda: f"{longest} for {int(bounds.diff().max())}")


def _window(window_size: tuple[int, int], tokens: int) -> tuple[int, int]:
    """Tokens before and after a query, at most all."""
    if len(window_size) != 2 or any(not isinstance(side, int) or side < -1 for side in window_size):
        raise must("window_size must be two integers, each at least -1", window_size)
    before, after = window_size
    return tokens if before == -1 else before, tokens or 1 if after == -1 else after
