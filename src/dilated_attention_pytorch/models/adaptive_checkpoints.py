"""Checkpoints of models with learned attention: weights, and the settings of each adaptive layer.

A state dict contains the sizes of a scorer but not the number of blocks it keeps; these files store both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from torch import nn

from ..errors import must, must_be
from ..nn import AdaptiveConfig, BlockSparseAdaptive, MultiheadBlockSparseAdaptive
from .checkpoints import State, load_checkpoint, read_with_facts, write_state
from .config import position_facts, position_from

FACTS = "adaptive"
"""Under which name a file keeps the settings."""
SCORER = "scorer.log_temperature"
"""The entry by which an adaptive layer is known among others."""
OF_LAYER = ("block_size", "is_causal", "softmax_scale", "position", "batch_first", "layer_norm_eps")
"""Settings of a layer besides its `AdaptiveConfig`."""
SETTINGS = (*OF_LAYER, *(field.name for field in fields(AdaptiveConfig)))
ADVICE = "Write it with save_adaptive, or say the settings that its layers were trained with."


class AdaptiveLayer(NamedTuple):
    """Adaptive layer of a checkpoint, with loaded weights."""

    name: str
    """Qualified name in the model; empty if it is the model."""
    module: BlockSparseAdaptive | MultiheadBlockSparseAdaptive
    is_causal: bool


def save_adaptive(model: nn.Module, path: str | os.PathLike[str], *, is_causal: bool) -> None:
    """Write a model's weights and the settings of its adaptive layers, to a `.safetensors` or a torch file.

    Args:
        model: any module that holds a `BlockSparseAdaptive`, alone or in its multihead form.
        path: the file; it is there whole or not at all.
        is_causal: how the layers are called.
    """
    stored: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseAdaptive):
            stored[name] = {"block_size": module.block_size, "is_causal": is_causal, **asdict(module.config)}
            stored[name]["softmax_scale"] = module.softmax_scale
    for name, module in model.named_modules():
        if isinstance(module, MultiheadBlockSparseAdaptive):
            own = {"position": position_facts(module.position), "batch_first": module.batch_first}
            own["layer_norm_eps"] = None if module.norm is None else module.norm.eps
            stored[_inside(name, "core")] |= own
    if not stored:
        raise must("a model must hold an adaptive layer", type(model).__name__)
    write_state(model.state_dict(), path, {FACTS: stored})


def load_adaptive(
    path: str | os.PathLike[str], settings: Mapping[str, Any] | None = None
) -> tuple[list[AdaptiveLayer], State]:
    """The adaptive layers of a checkpoint in the order of the file, in evaluation mode, and all its tensors.

    Args:
        path: a file that `save_adaptive` wrote, or any state dict with adaptive layers in it.
        settings: what a file without settings does not tell, the same for all layers: fields of `AdaptiveConfig`,
            `block_size`, `is_causal` and `softmax_scale`; of multihead modules also `position`, `batch_first` and
            `layer_norm_eps`.
    """
    state, facts = read_with_facts(path, FACTS)
    names = [entry.removesuffix(SCORER).removesuffix(".") for entry in state if _is_scorer(entry)]
    if not names:
        raise must("a checkpoint must hold an adaptive layer", f"none among {len(state)} tensors of {os.fspath(path)}")
    stored = facts.get(FACTS)
    if stored is not None and settings is not None:
        raise must("settings must be given once", f"settings in the file for {', '.join(map(repr, stored))}")
    if stored is None:
        if settings is None:
            raise must("a checkpoint must contain the settings of its adaptive layers", os.fspath(path), ADVICE)
        stored = dict.fromkeys(names, settings)
    if not isinstance(stored, Mapping) or set(stored) != set(names):
        raise must(f"a checkpoint must contain settings for its adaptive layers {names}", stored, ADVICE)
    return [_layer(name, stored[name], state) for name in names], state


def _is_scorer(entry: str) -> bool:
    return entry == SCORER or entry.endswith(f".{SCORER}")


def _inside(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _layer(name: str, stored: Any, state: State) -> AdaptiveLayer:
    if not isinstance(stored, Mapping):
        raise must_be("settings of an adaptive layer must be values by name", type(stored).__name__)
    unknown = sorted(set(stored) - set(SETTINGS))
    if unknown or "block_size" not in stored:
        came = ", ".join(unknown) if unknown else "no block_size"
        raise must(f"settings of an adaptive layer must be among {', '.join(SETTINGS)}", came)
    rest = dict(stored)
    size, is_causal = rest.pop("block_size"), bool(rest.pop("is_causal", False))
    scale, eps = (_number(name, rest.pop(name, None)) for name in ("softmax_scale", "layer_norm_eps"))
    position, batch_first = position_from(rest.pop("position", None)), bool(rest.pop("batch_first", True))
    config = AdaptiveConfig(**rest)
    own = _inside(name, "")
    queries, keys = (state[f"{own}scorer.match_{which}"] for which in ("query", "key"))
    heads, width, shared = len(state[_inside(name, SCORER)]), queries.shape[1], None
    if config.select != "head":
        heads, shared = len(queries), len(keys)
    around = own.removesuffix("core.")
    _check_sizes(config, state, own)
    module: BlockSparseAdaptive | MultiheadBlockSparseAdaptive
    if around != own and f"{around}q_proj.weight" in state:
        keys, values = (state[f"{around}{which}_proj.weight"] for which in "kv")
        options: dict[str, Any] = {"kdim": keys.shape[1], "vdim": values.shape[1], "num_kv_heads": len(keys) // width}
        options |= {"block_size": size, "layer_norm": f"{around}norm.weight" in state, "position": position}
        options |= {"batch_first": batch_first} | ({} if eps is None else {"layer_norm_eps": eps})
        options |= {"device": "cpu", "dtype": state[f"{around}q_proj.weight"].dtype}
        bias = f"{around}q_proj.bias" in state
        module = MultiheadBlockSparseAdaptive(heads * width, heads, [size], [1], 0.0, bias, config, **options)
        module.core.softmax_scale = scale
        own = around
    else:
        options = {"block_size": size, "num_kv_heads": shared, "softmax_scale": scale}
        options |= {"device": "cpu", "dtype": queries.dtype}
        module = BlockSparseAdaptive([size], [1], heads, width, config, **options)
    roots = {entry.partition(".")[0] for entry in module.state_dict()}
    given = {entry.removeprefix(own): x for entry, x in state.items() if entry.startswith(own)}
    load_checkpoint(module, {entry: x for entry, x in given.items() if entry.partition(".")[0] in roots})
    return AdaptiveLayer(own.removesuffix("."), module.eval(), is_causal)


def _number(name: str, value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise must_be(f"{name} of an adaptive layer must be a number", type(value).__name__)
    return value


def _check_sizes(config: AdaptiveConfig, state: State, own: str) -> None:
    """Refuse settings whose sizes differ from the stored tensors, before anything is built from them."""
    scorer = re.compile(rf"{re.escape(own)}scorer\.importance\.scorers\.0\.\d+\.weight")
    layers = [name for name in state if scorer.fullmatch(name)]
    stored = {"num_layers": len(layers), "match_rank": state[f"{own}scorer.match_query"].shape[2]}
    if config.num_layers > 1 and layers:
        stored["hidden_dim"] = len(state[layers[0]])
    wrong = [f"{name} {getattr(config, name)} for {n}" for name, n in stored.items() if getattr(config, name) != n]
    if wrong:
        raise must("settings of an adaptive layer must be those of its tensors", ", ".join(wrong))
