"""Map of the blocks that a head of a trained layer selects: `dap show --learned CHECKPOINT`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import must
from ..models import LongNetLM
from ..models.adaptive_checkpoints import AdaptiveLayer, load_adaptive
from ..models.checkpoints import State, read_state
from ..nn import LearnedPattern, MultiheadBlockSparseAdaptive
from .generate import load_model
from .train_settings import SAVED

TENSOR_FILES = (".safetensors", ".pt", ".pth")
MOST_BYTES = 4096
"""Bytes read of a text file unless a length is given."""
SYNTHETIC = 1024
BYTES = 256


def draw_learned(
    checkpoint: Path,
    layer: int,
    head: int,
    source: Path | None,
    n: int | None,
    width: int,
    settings: Mapping[str, Any] | None,
) -> tuple[str, int, int, list[list[float]]]:
    """Selection of one head of one layer for an input, in at most `width` x `width` cells.

    Returns a title, the tokens, the tokens along a cell, and the share of kept pairs in each cell.
    """
    layers, state = _load(checkpoint, settings)
    if not 0 <= layer < len(layers):
        named = ", ".join(f"{index} ({one.name or 'the model itself'})" for index, one in enumerate(layers))
        raise must(f"layer must be one of {named}", layer)
    selected = layers[layer]
    heads = selected.module.num_heads
    if not 0 <= head < heads:
        raise must(f"head must lie in 0 .. {heads - 1}", head)
    tensors, about = _input(selected, layer, state, source, n)
    with torch.no_grad():
        _, pattern = selected.module(*tensors, is_causal=selected.is_causal, return_pattern=True)
    coverage = f"{float(pattern.density):.0%} of blocks hold {float(pattern.captured):.0%} of attention"
    title = f"{checkpoint.name} layer {layer}" + (f" ({selected.name})" if selected.name else "")
    cell, share = _cells(pattern, head, width)
    return f"{title} on {about}, {coverage}", pattern.selection.n, cell, share


def _load(checkpoint: Path, settings: Mapping[str, Any] | None) -> tuple[list[AdaptiveLayer], State | LongNetLM]:
    """The adaptive layers of a checkpoint and its tensors, or the model of a run of `dap train`."""
    run = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if run != checkpoint and not (checkpoint.name == SAVED and (run / "log.jsonl").is_file()):
        return load_adaptive(checkpoint, settings)
    if settings is not None:
        raise must("settings must be given once", f"the run {run}, which holds them")
    model = load_model(run)
    modules = [(name, x) for name, x in model.named_modules() if isinstance(x, MultiheadBlockSparseAdaptive)]
    if not modules:
        raise must("the model of a run must hold an adaptive layer", f"none in {run}")
    return [AdaptiveLayer(name, module, True) for name, module in modules], model


def _hidden(model: LongNetLM, layer: AdaptiveLayer, token: Tensor) -> Tensor:
    """Input (1, n, width) of a layer of a model that reads a text."""
    inputs: list[Tensor] = []
    with torch.no_grad(), layer.module.register_forward_pre_hook(lambda _, given: inputs.append(given[0])):
        model(token[None])
    return inputs[0]


def _cells(pattern: LearnedPattern, head: int, width: int) -> tuple[int, list[list[float]]]:
    whole = pattern.selection
    own = slice(head // whole.group, head // whole.group + 1)
    mine = replace(whole, indices=whole.indices[:1, own], counts=whole.counts[:1, own], group=1)
    n, size, t = mine.n, mine.block_size, mine.blocks
    lengths = torch.full((t,), float(size), dtype=torch.float64)
    lengths[-1] = n - (t - 1) * size
    seen = mine.allowed()[0, 0].double()
    if mine.per_token:
        rows = torch.zeros(t, t, dtype=torch.float64).index_add_(0, mine.row_blocks(), seen)
    else:
        rows = seen * lengths[:, None]
    pairs = rows * lengths
    if mine.is_causal:
        pairs.diagonal().copy_(lengths * (lengths + 1) / 2)
    joined = -(-t // width)
    side = -(-t // joined)

    def sums(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, side * joined - t, 0, side * joined - t))
        return padded.view(side, joined, side, joined).sum((1, 3))

    return joined * size, (sums(pairs) / sums(lengths[:, None] * lengths)).tolist()


def _input(
    layer: AdaptiveLayer, index: int, state: State | LongNetLM, source: Path | None, n: int | None
) -> tuple[tuple[Tensor, ...], str]:
    """Input of the module, one sample, and its description."""
    module = layer.module
    if source is None:
        generator = torch.Generator().manual_seed(0)
        count = n or SYNTHETIC
        if isinstance(module, MultiheadBlockSparseAdaptive):
            return (torch.randn(1, count, module.embed_dim, generator=generator),), "synthetic normal hidden states"
        shape = (3, 1, count, module.num_heads, module.head_dim)
        query, key, value = torch.randn(shape, generator=generator)
        key_heads = len(module.scorer.match_key) if module.scorer.group > 1 else module.num_heads
        return (query, key[:, :, :key_heads], value[:, :, :key_heads]), "synthetic normal queries and keys"
    if not source.is_file():
        raise must("input must be a file", source)
    if source.suffix in TENSOR_FILES:
        tensors, what = _tensors(layer, read_state(source), source.name)
    else:
        tensors, what = _text(layer, index, state, source, n)
    count = tensors[0].shape[1]
    if n is not None and n > count:
        raise must(f"tokens must be <= the {count} of {source.name}", n)
    tensors = tuple(x[:, :n] for x in tensors)
    return tensors, f"the first {n} tokens of {what}" if n is not None and n < count else what


def _tensors(layer: AdaptiveLayer, given: Mapping[str, Tensor], name: str) -> tuple[tuple[Tensor, ...], str]:
    module = layer.module
    if isinstance(module, MultiheadBlockSparseAdaptive):
        shapes = {"hidden": (module.embed_dim,)}
    else:
        shapes = dict.fromkeys(("query", "key"), (module.num_heads, module.head_dim))
    if not set(shapes) <= set(given):
        raise must(f"an input for this layer must hold {' and '.join(shapes)}", f"{', '.join(given)} in {name}")
    tensors_in = []
    for part, shape in shapes.items():
        tensor = given[part].float()
        # The batch dimension is optional; the first sample is drawn.
        tensor = tensor if tensor.dim() == len(shape) + 2 else tensor[None]
        fits = tensor.dim() == len(shape) + 2 and tensor.numel() > 0 and tensor.shape[-1] == shape[-1]
        # Key heads may be shared by several query heads.
        if not fits or (tensor.shape[2] != shape[0] if part != "key" else shape[0] % tensor.shape[2]):
            raise must(f"{part} must have shape (tokens, {', '.join(map(str, shape))})", tuple(given[part].shape))
        tensors_in.append(tensor[:1])
    if len(tensors_in) == 2:
        if tensors_in[0].shape[1] != tensors_in[1].shape[1]:
            raise must("query and key must hold the same tokens", [x.shape[1] for x in tensors_in])
        tensors_in.append(tensors_in[1])
    return tuple(tensors_in), f"{' and '.join(shapes)} of {name}"


def _text(
    layer: AdaptiveLayer, index: int, state: State | LongNetLM, source: Path, n: int | None
) -> tuple[tuple[Tensor, ...], str]:
    module, kinds = layer.module, ", ".join(TENSOR_FILES)
    if not isinstance(module, MultiheadBlockSparseAdaptive):
        raise must("an input of bytes must go to a layer with projections", "none", f"Give query and key in {kinds}.")
    text = source.read_bytes()[: n or MOST_BYTES]
    if not text:
        raise must("input must have at least one byte", "an empty file")
    token = torch.tensor(list(text))
    if isinstance(state, LongNetLM):
        return (_hidden(state, layer, token),), f"bytes of {source.name}"
    advice = f"Give hidden states in {kinds}."
    if index:
        raise must("an input of bytes must go to the first layer; later layers read hidden states", index, advice)
    tables = _embeddings(state, layer.name, module.embed_dim)
    if len(tables) != 1:
        came = ", ".join(tables) or "none"
        raise must(f"a checkpoint must hold one embedding of bytes, {module.embed_dim} wide", came, advice)
    return (state[tables[0]][token].float()[None],), f"bytes of {source.name} through {tables[0]}"


def _embeddings(state: Mapping[str, Tensor], layer: str, width: int) -> list[str]:
    """Candidate byte embeddings: tensors with `embed` in their name, otherwise tensors stored before the layer."""
    fits = [name for name, x in state.items() if x.dim() == 2 and len(x) >= BYTES and x.shape[1] == width]
    named = [name for name in fits if "embed" in name]
    first = next((index for index, name in enumerate(state) if name.startswith(f"{layer}.")), len(state))
    return named or [name for name in fits if name in list(state)[:first]]
