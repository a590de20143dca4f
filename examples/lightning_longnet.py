"""A LongNet in PyTorch Lightning: the loss of the model is the training step.

pip install lightning && python examples/lightning_longnet.py
"""

import argparse
import tempfile

import lightning
import torch
from torch.utils.data import DataLoader

import dilated_attention_pytorch as dap


class Training(lightning.LightningModule):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.model = dap.LongNetLM("tiny", **settings)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Strategies wrap `forward`: with targets, the model's own is the loss.
        return self.model(tokens, targets=targets)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--tokens", 4096), ("--steps", 20), ("--devices", 1)):
        parser.add_argument(name, type=int, default=default)
    told = parser.parse_args()
    torch.manual_seed(0)
    sequences = [torch.randint(256, (told.tokens + 1,)).cumsum(0) % 256 for _ in range(2 * told.steps)]
    trainer = lightning.Trainer(
        max_steps=told.steps,
        devices=told.devices,
        strategy="ddp" if told.devices > 1 else "auto",
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.gettempdir(),
    )
    training = Training(num_decoder_layers=2, segment_lengths=[256, 1024], dilation_rates=[1, 4])
    trainer.fit(training, DataLoader(sequences, batch_size=2))
    print(f"loss {trainer.callback_metrics['loss']:.4f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
