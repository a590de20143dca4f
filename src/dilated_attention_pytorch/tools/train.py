"""Train a byte-level LongNet on a file: `dap train --data FILE`, or `python -m dilated_attention_pytorch.tools.train`.

Under torchrun every rank takes its samples (`--parallel data`) or its part of every sequence (`--parallel context`).
A run writes to its folder: `log.jsonl`, `checkpoint.pt` (replaced in one step), and `loss.png` where matplotlib is.
Which bytes a step reads is a function of the seed and the step alone, so a run that was stopped goes on as if it had
not been.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .console import Parser, dtype_name, leave
from .train_settings import SAVED, TrainSettings, is_restarted


def main(arguments: list[str] | None = None) -> int:
    """Read options, train. Exit status: 0 done, 130 interrupted and saved."""
    parser = Parser("dap train", "Train a byte-level LongNet on a file.", "[PATTERN]")
    usual: dict[str, Any] = {field.name: field.default for field in fields(TrainSettings)}
    help_of = {field.name: field.metadata.get("help", "") for field in fields(TrainSettings)}
    shared: dict[str, Callable[[], None]] = {
        "pattern": lambda: parser.pattern(
            more='; "learned:0.1;block=128" selects blocks by content; the size\'s own dilated pattern by default'
        ),
        "context": lambda: parser.tokens(dest="context", default=usual["context"], help=help_of["context"]),
        "device": parser.device,
        "out": lambda: parser.out(help_of["out"], Path(usual["out"])),
        "json": lambda: parser.json(help_of["json"]),
        "dtype": lambda: parser.option(
            "--dtype", read=dtype_name, default="auto", metavar="DTYPE", help=help_of["dtype"]
        ),
    }
    for field in fields(TrainSettings):
        option, text = f"--{field.name.replace('_', '-')}", help_of[field.name]
        if field.name in shared:
            shared[field.name]()
        elif isinstance(field.default, bool):
            parser.option(option, action="store_true", help=text)
        else:
            kind: type = str if field.default is None else type(field.default)
            shown = "FILE" if field.name == "data" else {int: "N", float: "X"}.get(kind, "NAME")
            parser.option(option, type=kind, default=field.default, metavar=shown, help=text)
    given: dict[str, Any] = vars(parser.read(arguments))
    given["out"] = str(given["out"])
    settings = TrainSettings(**given)
    settings = replace(settings, resume=settings.resume or (is_restarted() and Path(settings.out, SAVED).is_file()))
    import torch
    import torch.distributed as dist

    from .training import Run

    parallel = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if parallel:
        dist.init_process_group("nccl" if settings.device != "cpu" and torch.cuda.is_available() else "gloo")
    try:
        status = Run(settings).train()
        if parallel:
            # A gloo rank that ends while another one communicates aborts it.
            dist.barrier()
        return status
    finally:
        if parallel:
            dist.destroy_process_group()


if __name__ == "__main__":
    leave(main)
