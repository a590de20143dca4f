"""`dap generate`: continue a text with a model that `dap train` wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import must
from .console import Parser, device_of, leave, positive, print_json, tokens, whole
from .train_settings import SAVED, TrainSettings

if TYPE_CHECKING:
    from ..models import LongNetLM

TOP_P = 0.95


def load_model(path: Path, device: str = "cpu") -> LongNetLM:
    """The model of a run, from its folder or its checkpoint."""
    import torch

    from ..models import LongNetLM
    from ..models.checkpoints import read_torch
    from . import train_checkpoints

    path = path / SAVED if path.is_dir() else path
    if not path.is_file():
        raise must("a checkpoint must be a file or a folder of `dap train`", str(path))
    checkpoint = read_torch(path, device)
    if not isinstance(checkpoint, dict) or "settings" not in checkpoint or not {"model", "shards"} & checkpoint.keys():
        raise must("a checkpoint must hold a model and its settings, as `dap train` writes them", str(path))
    model = LongNetLM(TrainSettings.stored(checkpoint["settings"]).model(), device=torch.device(device))
    train_checkpoints.load(checkpoint, path.parent, model)
    return model.eval()


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = Parser("dap generate", "Continue a text with a model trained by `dap train`.", "CHECKPOINT")
    parser.option("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint.pt, or the folder that holds it")
    parser.option("--prompt", metavar="TEXT", help="beginning of the text; a line break by default, - for stdin")
    parser.option("-n", "--tokens", read=tokens, default=256, metavar="COUNT", help="bytes to write")
    parser.option("--temperature", type=float, default=0.8, metavar="X", help="0 always selects the most likely byte")
    parser.option("--top-p", read=positive, metavar="X", help=f"total probability of sampled bytes; {TOP_P} by default")
    parser.option("--top-k", read=whole(1), metavar="COUNT", help="sample from this many most likely bytes")
    parser.option("--seed", type=int, default=0, metavar="N", help="seed of the sampling")
    parser.device()
    parser.json("print prompt and text as one JSON object")
    options = parser.read(arguments)
    import torch

    device = device_of(options.device)
    model = load_model(options.checkpoint, device)
    prompt = sys.stdin.buffer.read() if options.prompt == "-" else (options.prompt or "\n").encode()
    if not prompt:
        raise must("the prompt must have at least one byte", "none")
    ids = torch.tensor([list(prompt)], device=device)
    # Without sampling there is nothing to choose from.
    top_p = TOP_P if options.top_p is None and options.temperature > 0 else options.top_p
    generated = model.generate(
        ids,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=top_p,
        generator=torch.Generator(device).manual_seed(options.seed),
    )
    text, shown = bytes(generated[0].tolist()).decode("utf-8", "replace"), prompt.decode("utf-8", "replace")
    print_json({"prompt": shown, "text": text}) if options.json else print(shown + text)
    return 0


if __name__ == "__main__":
    leave(main)
