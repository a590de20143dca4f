"""A LongNet under Hugging Face Accelerate: `accelerator.prepare`, then the model's loss through its forward.

pip install accelerate && python examples/accelerate_longnet.py
accelerate launch --num_processes 8 examples/accelerate_longnet.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import dilated_attention_pytorch as dap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--tokens", 4096), ("--steps", 20)):
        parser.add_argument(name, type=int, default=default)
    told = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    sequences = [torch.randint(256, (told.tokens + 1,)).cumsum(0) % 256 for _ in range(told.steps)]
    model = dap.LongNetLM("tiny", num_decoder_layers=2, segment_lengths=[256, 1024], dilation_rates=[1, 4])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(sequences, batch_size=1))
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(tokens[:, :-1], targets=tokens[:, 1:])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f} on {accelerator.num_processes} processes")


if __name__ == "__main__":
    main()
