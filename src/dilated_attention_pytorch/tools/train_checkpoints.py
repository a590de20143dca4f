"""Checkpoints of `dap train`: all in one file, or a file and a folder of shards where several ranks trained.

A checkpoint of either kind continues on any number of ranks. torch reads the index and the numbers in a folder of
shards by pickle, so both are checked first: a file that names anything but the classes of a checkpoint is refused.
"""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..errors import must
from ..models.checkpoints import write_torch

SHARDS = "checkpoint-"
"""Beginning of the name of a folder of shards; the step follows."""
INDEX_NAMES = {
    "pathlib": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""Names in the index of a folder of shards, by module."""


def save(state: dict[str, Any], path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write `state` with the weights and moments; readers see the old checkpoint or the new one, never a part."""
    if not dist.is_initialized():
        write_torch({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **state}, path)
        _remove_shards(path.parent, keep="")
        return
    name, is_first = f"{SHARDS}{state['step']}", dist.get_rank() == 0
    if is_first:
        shutil.rmtree(path.parent / name, ignore_errors=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path.parent / name)
    if is_first:
        write_torch({**state, "shards": name}, path)
        _remove_shards(path.parent, keep=name)


def _remove_shards(folder: Path, keep: str) -> None:
    for old in folder.glob(f"{SHARDS}*"):
        if old.name != keep:
            shutil.rmtree(old, ignore_errors=True)


def load(state: dict[str, Any], folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load the weights, and with `optimizer` the moments, of a checkpoint into a model on any number of ranks."""
    if "shards" in state:
        held: dict[str, Any] = {"model": get_model_state_dict(model)}
        if optimizer is not None:
            held["optimizer"] = get_optimizer_state_dict(model, optimizer)
        with warnings.catch_warnings():
            # One process may read the shards of several; torch warns about it.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            shards = folder / Path(state["shards"]).name
            _check_index(shards / ".metadata")
            dcp.load(held, checkpoint_id=shards, planner=_Planner(), no_dist=not dist.is_initialized())
        set_model_state_dict(model, held["model"])
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, held["optimizer"])
    elif not dist.is_initialized():
        model.load_state_dict(state["model"])
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
    else:
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, state["model"], options=whole)
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, _by_name(state["optimizer"], model, optimizer), options=whole)


def _by_name(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of an optimizer by the names of parameters instead of their numbers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [order[i] for i in group["params"]]} for group in saved["param_groups"]]
    return {"state": {order[i]: value for i, value in saved["state"].items()}, "param_groups": groups}


class _Index(pickle.Unpickler):
    """Unpickler that accepts only the classes of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in INDEX_NAMES.get(module, ()):
            raise must("the index of a folder of shards must hold classes of checkpoints", f"{module}.{name}")
        return super().find_class(module, name)


def _check_index(path: Path) -> None:
    with open(path, "rb") as file:
        _Index(file).load()


class _Planner(DefaultLoadPlanner):
    """Planner that refuses values besides tensors and plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
