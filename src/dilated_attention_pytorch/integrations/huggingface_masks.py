"""Masks of Hugging Face models as patterns: windows, chunks, packed documents, bidirectional blocks, padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import must, must_be
from ..ops.checks import require
from ..patterns import And, Causal, Dilated, Full, Or, Pattern, SlidingWindow

ATTRIBUTE = "dap_mask"
"""Attribute of the tensors that `model_mask` returns; transformers passes the tensors on as they are."""

REFUSED = 'Use attn_implementation="sdpa" or "eager" for this model.'


class MaskTensor(Tensor):
    """Tensor that `model_mask` returns. It stands for a mask of all pairs, whose values it does not hold.

    Copies keep the description. Computing with the values raises: the code of a model would get other results.
    """

    COPIES = frozenset({"__get__", "contiguous", "detach", "clone", "to", "cpu", "cuda", "requires_grad_"})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        refusal = must("the mask must be read by attention functions alone", f"{name} in the model's code", REFUSED)
        try:
            result = super().__torch_function__(func, types, args, kwargs or {})
        except (IndexError, RuntimeError) as error:
            # Its shape is that of a row for each sample.
            raise error if name in cls.COPIES else refusal from error
        if not isinstance(result, Tensor):
            return result
        if name not in cls.COPIES:
            raise refusal
        setattr(result, ATTRIBUTE, getattr(args[0], ATTRIBUTE, None))
        return result


class Samples(NamedTuple):
    """Samples of a batch that share their padding, documents and blocks."""

    index: slice | list[int]
    start: int
    """Padding tokens before the first real one."""
    documents: tuple[int, ...] | None
    blocks: tuple[int, ...] | None


class ModelMask(NamedTuple):
    """Mask that a model builds, as a pattern."""

    pattern: Pattern
    is_causal: bool
    first_query: int = 0
    """Position of the first query; 0 without a cache."""
    first_key: int = 0
    """Position of the first cached key; 0 unless the cache drops keys."""
    real: Tensor | None = None
    """bool (B, keys), False for padding; None without padding."""
    known: Tensor | None = None
    """bool (B, tokens): `real` with the keys that a cache dropped."""
    starts: tuple[int, ...] | None = None
    """Padding tokens before the first real one, by sample; None until the host has read them."""
    documents: tuple[tuple[int, ...], ...] | None = None
    """Lengths of packed documents, by sample."""
    blocks: tuple[tuple[int, ...], ...] | None = None
    """Lengths of blocks whose tokens see each other, besides the pattern, by sample; counted from `starts`."""
    is_bounded: bool = False
    """Whether tokens of a block see each other within the window alone."""
    refusal: ValueError | None = None
    """Error for the layers that use this mask; models build masks that no layer uses."""

    def samples(self, batch: int, shifts: bool) -> list[Samples]:
        """Samples to compute at a time; with `shifts`, positions count from the first real token of a sample."""
        starts = self.starts if shifts else None
        if shifts and starts is None and self.known is not None:
            starts = _starts(self.known)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for b in range(batch):
            start = starts[b] if starts is not None else 0
            shared = (column and column[b] for column in (self.documents, self.blocks))
            groups.setdefault((start, *shared), []).append(b)
        if not groups:
            return [Samples(slice(None), 0, None, None)]
        if len(groups) == 1:
            return [Samples(slice(None), *shared) for shared in groups]
        return [Samples(slice(own[0], own[0] + 1) if len(own) == 1 else own, *shared) for shared, own in groups.items()]


def is_relative(pattern: Pattern) -> bool:
    """Whether the pattern depends on the distance of query and key alone."""
    if isinstance(pattern, And | Or):
        return all(is_relative(side) for side in pattern.children)
    return isinstance(pattern, Full | Causal | SlidingWindow)


def both(one: Pattern, other: Pattern) -> Pattern:
    """Intersection, without a side that restricts nothing."""
    if isinstance(one, Full):
        return other
    return one if isinstance(other, Full) else one & other


def model_mask(
    *,
    q_length: int,
    kv_length: int,
    batch_size: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
    **others: Any,
) -> Tensor:
    """Mask of a whole batch for `transformers.AttentionMaskInterface`: (B, 1, 1, keys), with its `ModelMask`.

    Padding, packed documents and the position in a static cache are read by the host, once for each mask of a forward
    pass.
    """
    first_query, first_key = int(q_offset), int(kv_offset)
    pattern, is_causal, documents, blocks, is_bounded, refusal = _decoded(mask_function)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise must("attention_mask must have shape (batch, tokens)", tuple(attention_mask.shape), REFUSED)
    if documents is not None and (first_query or kv_length != q_length):
        raise must("packed documents must come without a cache", f"{q_length} queries of {kv_length} keys")
    if first_key and isinstance(pattern, Full):
        refusal = must("a cache that drops keys must come with a window", f"keys from {first_key} on and no window")
    batch = _batch(batch_size, attention_mask, documents)
    real = known = starts = None
    compiling = torch.compiler.is_compiling() or (attention_mask is not None and attention_mask.is_meta)
    if attention_mask is not None and (compiling or not bool(attention_mask.all())):
        missing = first_key + kv_length - attention_mask.shape[1]
        known = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
        # A compiler traces no values: under it, layers with absolute patterns read the starts themselves.
        starts = None if compiling else _starts(known)
        real = known[:, first_key : first_key + kv_length]
    spans = None if documents is None else tuple(_runs(row) for row in documents.tolist())
    spans = None if spans is None or all(len(row) == 1 for row in spans) else spans
    lengths = None
    if blocks is not None:
        ids = blocks[:, : first_query + q_length].tolist()
        if not first_query:
            first = [0] * batch if known is None else starts or _starts(known)
            lengths = tuple(_block_lengths(row[start:]) for row, start in zip(ids, first, strict=True))
        elif any(value >= 0 for row in ids for value in row[first_query:]):
            raise must("tokens after a cached prefix must be causal", "bidirectional blocks among them", REFUSED)
    mask = torch.ones(batch, kv_length, dtype=torch.bool, device=device) if real is None else real
    # `generate` calls `contiguous()`, whose result for a contiguous tensor is the object itself.
    mask = mask[:, None, None].contiguous()
    # A row of padding is the whole mask of one query that sees all keys, as in attention pooling.
    is_whole = q_length == 1 and not is_causal and isinstance(pattern, Full) and documents is blocks is None
    mask = mask if compiling or is_whole else mask.as_subclass(MaskTensor)
    padding = real, known, starts
    described = ModelMask(pattern, is_causal, first_query, first_key, *padding, spans, lengths, is_bounded, refusal)
    setattr(mask, ATTRIBUTE, described)
    return mask


def _starts(known: Tensor) -> tuple[int, ...]:
    """Padding tokens before the first real one of each sample."""
    return tuple((known.cumsum(-1) == 0).sum(-1).tolist())


def _batch(batch_size: int | None, *given: Tensor | None) -> int:
    return next((len(tensor) for tensor in given if tensor is not None), 1) if batch_size is None else batch_size


def _runs(numbers: Iterable[int]) -> tuple[int, ...]:
    """Lengths of runs of equal numbers."""
    return tuple(len(list(run)) for _, run in groupby(numbers))


def _block_lengths(ids: list[int]) -> tuple[int, ...]:
    """Lengths of blocks from the number of each token's block; a token of block -1 is alone."""
    runs = [(number, len(list(run))) for number, run in groupby(ids)]
    numbered = [number for number, _ in runs if number >= 0]
    if len(set(numbered)) != len(numbered):
        raise must("tokens of one bidirectional block must be contiguous", "a block in several places", REFUSED)
    return tuple(length for number, run in runs for length in ([run] if number >= 0 else [1] * run))


def _decoded(
    mask_function: Callable[..., Any] | None,
) -> tuple[Pattern, bool, Tensor | None, Tensor | None, bool, ValueError | None]:
    """Pattern, causality, document numbers (B, N), block numbers (B, N), `is_bounded` and refusal of mask functions."""
    from transformers import masking_utils as known  # pyrefly: ignore[missing-import]

    mask_function, blocks = _without_blocks(mask_function, known)
    pattern, documents, refusal = Full(), None, None
    is_causal, is_open, is_bounded = mask_function is None, False, False
    for term in _terms(mask_function, known):
        inner, within = _without_blocks(term, known)
        if within is not None and blocks is None:
            # Gemma 3 restricts causal tokens and blocks to a window.
            term, blocks, is_bounded = inner, within, True
        if term is known.causal_mask_function:
            is_causal = True
        elif term is not known.bidirectional_mask_function:
            window = _captured(term, known.sliding_window_overlay(1), "sliding_window")
            around = _captured(term, known.sliding_window_bidirectional_overlay(1), "sliding_window")
            chunk = _captured(term, known.chunked_overlay(1, _NONE), "chunk_size")
            numbers = _captured(term, known.packed_sequence_mask_function(_NONE), "packed_sequence_mask")
            if window == 0:
                refusal = must("sliding_window must be at least 1", window, REFUSED)
            elif window is not None:
                # The overlay leaves the future open; transformers adds the causal mask.
                pattern, is_open = both(pattern, SlidingWindow(window - 1)), True
            elif around is not None:
                pattern = both(pattern, SlidingWindow(around))
            elif chunk is not None:
                pattern = both(pattern, Dilated((chunk,), (1,)))
            elif numbers is not None:
                documents = numbers
            elif (own := _own_window(term)) is not None:
                pattern = both(pattern, own)
            else:
                raise _unknown(term)
    if not is_causal and (is_open or blocks is not None):
        raise _unknown(mask_function)
    if documents is not None and (blocks is not None or not is_relative(pattern)):
        raise must("packed documents must come with a causal mask or a window", "chunks or blocks", REFUSED)
    return pattern, is_causal, documents, blocks, is_bounded, refusal


def _without_blocks(function: Any, known: Any) -> tuple[Any, Tensor | None]:
    """Mask function and block numbers of a union of both; any other function, and None."""
    either = _captured(function, known.or_masks(), "mask_functions")
    if either is None:
        return function, None
    overlay = getattr(known, "blockwise_overlay", None)
    blocks = None if overlay is None else _captured(either[-1], overlay(_NONE), "block_sequence_ids")
    if len(either) != 2 or blocks is None:
        raise _unknown(function)
    return either[0], blocks


_NONE = torch.empty(0, device="cpu")


def _terms(mask_function: Callable[..., Any] | None, known: Any) -> list[Callable[..., Any]]:
    """Mask functions whose intersection a mask function is."""
    if mask_function is None:
        return []
    remap = getattr(known, "remap_positions_for_packed_sequence", None)
    if remap is not None:
        # Positions inside a document differ from those of the row by a constant, so that distances are the same.
        mask_function = _captured(mask_function, remap(None, _NONE), "mask_function") or mask_function
    inner = _captured(mask_function, known.and_masks(), "mask_functions")
    return [mask_function] if inner is None else [term for one in inner for term in _terms(one, known)]


def _captured(function: Any, like: Any, name: str) -> Any:
    """The variable that a closure captured, if it runs the code of `like`."""
    if getattr(function, "__code__", None) is not like.__code__:
        return None
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _own_window(function: Any) -> SlidingWindow | None:
    """Window of a function that some models have instead of an overlay: T5Gemma 2, Gemma 4 and Moonshine encoders."""
    if getattr(function, "__qualname__", "") != "sliding_window_mask_function.<locals>.inner_mask":
        return None
    captured = inspect.getclosurevars(function).nonlocals
    window = captured["sliding_window"]
    if isinstance(window, int):
        window = (window, 0) if captured["is_causal"] else ((window + 1) // 2, window // 2 + 1)
    before, after = window
    return SlidingWindow(before - 1, max(after - 1, 0)) if before > 0 else None


def _unknown(function: Any) -> ValueError:
    return must(
        "the model's mask must be causal, bidirectional, a window, chunks, packed documents or bidirectional blocks",
        f"a mask function of its own, {getattr(function, '__qualname__', function)}",
        REFUSED,
    )


def _allowed(mask: Tensor) -> Tensor:
    """Pairs that a mask allows: those of a bool mask, or 0 in a mask that is added to scores."""
    if not mask.is_floating_point():
        return mask.bool()
    allowed = mask == 0
    what = "a mask of floats must be 0, or at most -1e4 where a key is ignored"
    return require(allowed, (allowed | (mask <= -1e4)).all(), what, lambda: "other values", REFUSED)


def _documents_of(mask: Tensor, n: int) -> tuple[tuple[int, ...], ...] | None:
    """Documents of a block-diagonal mask (B, 1, N, N), such as those of the images of Pixtral; None for other masks."""
    if tuple(mask.shape[1:]) != (1, n, n) or torch.compiler.is_compiling():
        return None
    allowed = _allowed(mask)[:, 0]
    begins = ~torch.nn.functional.pad(allowed.diagonal(-1, 1, 2), (1, 0))
    numbers = begins.cumsum(-1)
    if not torch.equal(allowed, numbers[:, :, None] == numbers[:, None, :]):
        return None
    return tuple(_runs(row) for row in numbers.tolist())


def given_mask(
    attention_mask: Tensor | None, is_causal: bool, sliding_window: int | None, queries: int, keys: int
) -> ModelMask:
    """Mask that a module received: that of `model_mask`, one row per sample, or none."""
    if attention_mask is not None:
        mask = getattr(attention_mask, ATTRIBUTE, None)
        if mask is not None:
            if attention_mask.shape[-1] != keys:
                raise must(f"the mask must cover the {keys} keys", attention_mask.shape[-1], REFUSED)
            if mask.refusal is not None:
                raise mask.refusal
            return mask
        # A mask of the model's own making is complete, as in transformers' implementations.
        if attention_mask.dim() == 4 and attention_mask.shape[1:3] == (1, 1):
            attention_mask, is_causal = _allowed(attention_mask)[:, 0, 0], False
        elif (documents := _documents_of(attention_mask, queries)) is not None:
            return ModelMask(Full(), False, documents=documents)
        if attention_mask.dim() != 2 or attention_mask.is_floating_point():
            raise must_be(
                "attention_mask must be (batch, tokens), 1 for real tokens",
                f"{attention_mask.dtype} {tuple(attention_mask.shape)}",
                "Dense masks cannot be honoured here; write them as a pattern.",
            )
    pattern: Pattern = Full()
    if sliding_window:
        pattern = SlidingWindow(sliding_window - 1)
    first = keys - queries if is_causal else 0
    if attention_mask is None:
        return ModelMask(pattern, is_causal, first)
    mask = model_mask(q_length=queries, kv_length=keys, q_offset=max(first, 0), attention_mask=attention_mask)
    return getattr(mask, ATTRIBUTE)._replace(pattern=pattern, is_causal=is_causal)
