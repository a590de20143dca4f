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

HELP = {
    "data": "file of text or bytes; the sources of Python's standard library by default",
    "out": "folder of the run",
    "size": "tiny, small, base, large or 1b",
    "dense": "train with torch's dense attention instead, for comparison",
    "context": "bytes of a sequence",
    "batch": "sequences per batch; with --parallel data, over all ranks",
    "accumulate": "batches per step",
    "steps": "number of steps; with --resume, a larger number extends a run",
    "lr": "peak learning rate: linear warm-up, then cosine decay to a tenth",
    "warmup": "steps of warm-up",
    "weight_decay": "weight decay of matrices (AdamW)",
    "dropout": "dropout probability of activations",
    "clip": "maximal norm of the gradient",
    "seed": "seed of the weights and the order of the data",
    "dtype": "float32, bfloat16 (matrix products only; weights stay float32), or auto: bfloat16 on GPUs",
    "parallel": "under torchrun: data (samples are divided over ranks) or context (each sequence is divided)",
    "checkpointing": "store only the input of each layer and recompute layers in the backward pass",
    "save_every": "steps between checkpoints",
    "eval_every": "steps between evaluations on the held-out end of the file; 0 evaluates after the last step only",
    "eval_windows": "sequences per evaluation",
    "log_every": "steps between printed lines",
    "sample": "bytes to generate after training",
    "resume": "continue from the checkpoint in --out",
    "json": "print the lines of the log as JSON; other messages go to stderr",
}


def main(arguments: list[str] | None = None) -> int:
    """Read options, train. Exit status: 0 done, 130 interrupted and saved."""
    parser = Parser("dap train", "Train a byte-level LongNet on a file.", "[PATTERN]")
    usual: dict[str, Any] = {field.name: field.default for field in fields(TrainSettings)}
    shared: dict[str, Callable[[], None]] = {
        "pattern": lambda: parser.pattern(
            more='; "learned:0.1;block=128" selects blocks by content; the size\'s own dilated pattern by default'
        ),
        "context": lambda: parser.tokens(dest="context", default=usual["context"], help=HELP["context"]),
        "device": parser.device,
        "out": lambda: parser.out(HELP["out"], Path(usual["out"])),
        "json": lambda: parser.json(HELP["json"]),
        "dtype": lambda: parser.option("--dtype", read=dtype_name, default="auto", metavar="DTYPE", help=HELP["dtype"]),
    }
    for field in fields(TrainSettings):
        option, text = f"--{field.name.replace('_', '-')}", HELP.get(field.name, "")
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
