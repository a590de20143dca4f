"""Train a small LongNet on the sources of Python, stop and resume the run, and generate text.

python examples/train_longnet.py --context 8192 --steps 40
"""

import argparse
import tempfile

import torch

from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, load_checkpoint
from dilated_attention_pytorch.tools import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", help="folder of the run; a temporary one by default")
    arguments = parser.parse_args()
    config = LongNetConfig.named("tiny")
    print(f"{config.num_parameters:,} parameters, {config.flops(arguments.context) / 1e9:.1f} Gflop forward")

    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or folder
        options = ["--context", arguments.context, "--steps", arguments.steps, "--warmup", 5, "--eval-windows", 1]
        train.main([*map(str, options), "--out", out, "--eval-every", "0"])

        # What the run left is an ordinary checkpoint.
        model = LongNetLM(config)
        held = torch.load(f"{out}/checkpoint.pt", weights_only=True)
        load_checkpoint(model, held["model"])
        prompt = torch.tensor([list(b"def ")])
        found = model.generate(prompt, 40, temperature=0.8, top_p=0.95)
        print(bytes(found[0].tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
