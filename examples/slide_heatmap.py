"""Embed an artificial slide and draw the attention of the encoder over it.

Real slides: load_slide_encoder("slide_encoder.pth") instead of SlideEncoder(...), tiles from the tile encoder.
"""

import argparse
from pathlib import Path

import torch

from dilated_attention_pytorch.models import SlideEncoder


def make_slide(side: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tiles (1, N, width), their corners (1, N, 2) in pixels, and where tissue of another kind lies."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    distance = (row - side / 2).square() + (column - side / 2).square()
    tissue = distance < (0.45 * side) ** 2
    odd = (row - side / 3).square() + (column - side / 2).square() < (side / 10) ** 2
    cells = torch.stack([row[tissue], column[tissue]], -1)
    tiles = torch.randn(len(cells), width) + 3 * odd[tissue][:, None] * torch.randn(width)
    return tiles[None], 256 * cells[None], odd[tissue]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=64, help="tiles along a side")
    parser.add_argument("--out", type=Path, help="PNG to draw; needs matplotlib")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    encoder = SlideEncoder(tile_width=96, d_model=192, num_layers=4, nhead=16, global_pool=True).eval()
    tiles, coords, odd = make_slide(arguments.side, 96)
    with torch.no_grad():
        print(f"{tiles.shape[1]:,} tiles, embedding {tuple(encoder(tiles, coords).shape)}")
    chosen = int(odd.nonzero()[0])
    seen = encoder.attention_map(tiles, coords, chosen)[0, 0, 1:]
    share = encoder.rollout(tiles, coords)[0, 1:]
    print(f"tile {chosen} gives {100 * seen[odd].sum() / seen.sum():.0f} % of its attention to its own kind,")
    print(f"which is {100 * odd.float().mean():.0f} % of the tiles and {100 * share[odd].sum():.0f} % of the rollout")
    assert torch.allclose(encoder.rollout(tiles, coords).sum(), torch.tensor(1.0), atol=1e-4)
    if arguments.out is None:
        return
    from matplotlib.figure import Figure

    axes = Figure(figsize=(10, 5)).subplots(1, 2)
    for axis, (title, values) in zip(axes, {f"tile {chosen} looks at": seen, "rollout": share}.items(), strict=True):
        picture = torch.full((arguments.side, arguments.side), float("nan"))
        picture[tuple((coords[0] // 256).T)] = values
        axis.imshow(picture, cmap="magma")
        axis.set(title=title, xticks=[], yticks=[])
    axes[0].figure.savefig(arguments.out)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
