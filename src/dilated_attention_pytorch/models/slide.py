"""An encoder for pathology slides: embeddings of tiles and where they lie in, an embedding of the slide out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import must
from ..ops import attention, attention_rows
from ..ops.checks import require
from .config import LongNetConfig
from .layers import DilatedTransformerEncoderLayer, evaluating, world_of
from .longnet import Stack

ROLLOUT_WIDTH = 16
"""Columns of the values in which `rollout` carries its one; narrower ones are not a shape that GPU kernels like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideConfig:
    """Configuration of a slide encoder; the defaults are those of the published 12 x 768 encoder.

    >>> SlideConfig().segments
    (1024, 5792, 32768, 185363, 1048576)
    """

    tile_width: int = 1536
    """Width of a tile's embedding."""
    d_model: int = 768
    num_layers: int = 12
    nhead: int = 16
    dim_feedforward: int | None = None
    """4 x `d_model` by default."""
    tile_size: int = 256
    """Pixels of a tile's side, in the units of the coordinates."""
    slide_size: int = 262144
    """Pixels of the largest slide's side; segments grow up to its number of tiles."""
    grid: int = 1000
    """Tiles per side of the position table."""
    segment_lengths: tuple[int, ...] | None = None
    """By default five from 1024 to the tiles of the largest slide, a constant factor apart."""
    dilation_rates: tuple[int, ...] = (1, 2, 4, 8, 16)
    offset: str = "block"
    """Residue that a head samples; see `Dilated`."""
    global_pool: bool = False
    """Average the tiles, rather than take the class token."""
    dropout: float = 0.0
    zero_padding: bool = False
    """torchscale's padding, with which published weights were trained; see `published`."""
    shifted_segments: bool = False
    """torchscale's placement of outputs on slides of more than 185,363 tiles; see `published`."""
    detach_mixing: bool = False
    """torchscale's gradient, likewise."""
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.d_model % 4:
            raise must("d_model must be a multiple of 4, for sines and cosines of two coordinates", self.d_model)
        for name in ("tile_width", "num_layers", "tile_size", "grid"):
            if getattr(self, name) < 1:
                raise must(f"{name} must be >= 1", getattr(self, name))
        if self.segment_lengths is None and self.slide_size // self.tile_size < 32:
            raise must("slide_size must be at least 32 tiles", self.slide_size, "Or give segment_lengths.")

    @property
    def segments(self) -> tuple[int, ...]:
        """Tokens in a segment, one for each branch."""
        if self.segment_lengths is not None:
            return tuple(self.segment_lengths)
        last = int(math.log2((self.slide_size // self.tile_size) ** 2))
        steps = max(1, len(self.dilation_rates) - 1)
        return tuple(int(2 ** (10 + (last - 10) * i / steps)) for i in range(len(self.dilation_rates)))

    def longnet(self) -> LongNetConfig:
        """The stack of layers."""
        return LongNetConfig(
            d_model=self.d_model,
            nhead=self.nhead,
            num_encoder_layers=self.num_layers,
            num_decoder_layers=0,
            dim_feedforward=self.dim_feedforward or 4 * self.d_model,
            segment_lengths=self.segments,
            dilation_rates=self.dilation_rates,
            offset=self.offset,
            dropout=self.dropout,
            position=None,
            zero_padding=self.zero_padding,
            shifted_segments=self.shifted_segments,
            detach_mixing=self.detach_mixing,
            gradient_checkpointing=self.gradient_checkpointing,
        )

    def flops(self, tiles: int) -> int:
        """Floating-point operations of a forward pass over a slide."""
        layers = self.longnet()
        # A LongNet counts the logits of its vocabulary, which a slide does not have.
        unembedding = 2 * (tiles + 1) * layers.num_tokens * self.d_model
        return layers.flops(tiles + 1) - unembedding + 2 * tiles * self.tile_width * self.d_model

    @property
    def num_parameters(self) -> int:
        """Parameters of the encoder."""
        layers = self.longnet()
        return layers.num_parameters - layers.num_tokens * self.d_model + (self.tile_width + 4) * self.d_model

    def memory(self, tiles: int, itemsize: int = 4) -> int:
        """Peak bytes of a forward pass without gradients, including the weights and the slide's tiles.

        That is inside a feed-forward block: the stack's input, the layer's, the block's and its normalised copy, and
        two rows of the block's width. Attention holds less.
        """
        token = 4 * self.d_model + 2 * self.longnet().dim_feedforward
        return itemsize * (self.num_parameters + tiles * self.tile_width + (tiles + 1) * token) + 16 * tiles


def axis_positions(grid: int, width: int, device: torch.device | None = None) -> Tensor:
    """Sines, then cosines, of the places along one side of the grid, (grid, width), float64."""
    half = width // 2
    rate = 10000.0 ** -(torch.arange(half, device=device, dtype=torch.float64) / half)
    angle = torch.arange(grid, device=device, dtype=torch.float64)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], -1)


class SlideEncoder(nn.Module):
    """LongNet over the tiles of a slide.

    Args:
        config: a `SlideConfig`, or None for the published 12 x 768 encoder.
        device: device of the parameters.
        dtype: dtype of the parameters.
        settings: fields of `SlideConfig` to change.

    >>> encoder = SlideEncoder(tile_width=32, d_model=64, num_layers=2, nhead=4)
    >>> encoder(torch.randn(2, 50, 32), 256 * torch.randint(1000, (2, 50, 2))).shape
    torch.Size([2, 64])
    """

    def __init__(
        self,
        config: SlideConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.config = config = SlideConfig(**settings) if config is None else replace(config, **settings)
        factory_options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.tile_projection = nn.Linear(config.tile_width, config.d_model, **factory_options)
        nn.init.xavier_uniform_(self.tile_projection.weight)
        nn.init.zeros_(self.tile_projection.bias)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.d_model, **factory_options))
        nn.init.normal_(self.class_token, std=0.02)
        self.encoder = Stack(config.longnet(), "encoder", device, dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.d_model, 1e-6, **factory_options)

    def forward(
        self,
        tiles: Tensor,
        coords: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        all_layers: bool = False,
    ) -> Tensor:
        """The embedding of each slide.

        Args:
            tiles: (B, N, tile_width), in the order in which they were read from the slide.
            coords: (B, N, 2), the pixel at a corner of each tile, at full resolution.
            key_padding_mask: bool (B, N), True where there is no tile: for slides of different sizes in one batch.
            all_layers: also the embeddings before the first layer and after each.

        Returns:
            (B, d_model), or (B, layers + 1, d_model) with `all_layers`, where the last has not been through the
            normalisation at the end of the stack.
        """
        x, mask = self._tokens(tiles, coords, key_padding_mask)
        if not all_layers:
            return self._pooled(self.encoder(x, src_key_padding_mask=mask), mask)
        pooled = [self._pooled(x, mask)]
        for layer in self.encoder.layers:
            x = layer(x, src_key_padding_mask=mask)
            pooled.append(self._pooled(x, mask))
        return torch.stack(pooled, 1)

    def tokens(self, tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Hidden states of the class token and of every tile, (B, 1 + N, d_model)."""
        x, mask = self._tokens(tiles, coords, key_padding_mask)
        return self.encoder(x, src_key_padding_mask=mask)

    @torch.no_grad()
    def attention_map(
        self,
        tiles: Tensor,
        coords: Tensor,
        tile: int | Sequence[int] | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        layer: int = -1,
        average_heads: bool = True,
    ) -> Tensor:
        """Attention weights of selected tiles, for a slide of any size; only these rows are computed.

        Args:
            tiles: as for a call, as `coords` and `key_padding_mask`.
            tile: one tile or several; None for the class token.
            layer: index of the layer.
            average_heads: average over heads.

        Returns:
            Weights (B, rows, 1 + N), or (B, H, rows, 1 + N), float32: the class token's first, then every tile's. They
            sum to 1, also under `zero_padding`, where they are shares of what is given to real tokens.
        """
        rows = [-1] if tile is None else [tile] if isinstance(tile, int) else list(tile)
        outside = [row for row in rows if not -1 <= row < tiles.shape[1]]
        if outside or (tile is not None and -1 in rows):
            raise must(f"tile must lie in 0 .. {tiles.shape[1] - 1}", tile)
        layers = list(self.encoder.layers)
        if not -len(layers) <= layer < len(layers):
            raise must(f"layer must lie in {-len(layers)} .. {len(layers) - 1}", layer)
        with evaluating(self):
            x, mask = self._tokens(tiles, coords, key_padding_mask)
            for before in layers[: layer % len(layers)]:
                x = before(x, src_key_padding_mask=mask)
            selected: Any = layers[layer]
            query, key = self._query_and_key(selected, x)
        index = torch.tensor([row + 1 for row in rows], dtype=torch.int64, device=x.device)
        weights = attention_rows(query, key, selected.self_attn.pattern, index, key_padding_mask=mask)
        return weights.mean(1) if average_heads else weights

    def rollout(self, tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Contribution of each tile to the slide's embedding through all layers: (B, 1 + N), float32, sums to 1.

        Attention rollout: each layer propagates half of the identity and half of its weights, averaged over heads.
        The product of the layers' matrices is never formed. From the last layer back, a row vector times a matrix of
        weights is what attention's backward pass gives its values; so this takes the time and memory of attention.
        """
        with evaluating(self), torch.no_grad():
            x, mask = self._tokens(tiles, coords, key_padding_mask)
            before = []
            for layer in self.encoder.layers:
                before.append(x)
                x = layer(x, src_key_padding_mask=mask)
            share = torch.zeros(x.shape[:2], device=x.device)
            if self.config.global_pool:
                share[:, 1:] = 1.0 if mask is None else (~mask[:, 1:]).float()
                share /= share.sum(1, keepdim=True)
            else:
                share[:, 0] = 1.0
            for layer, entered in zip(reversed(self.encoder.layers), reversed(before), strict=True):
                share = (share + self._looked_at(layer, entered, mask, share)) / 2
            return share

    def _looked_at(self, layer: nn.Module, x: Tensor, mask: Tensor | None, share: Tensor) -> Tensor:
        """`share` (B, N) times the layer's weights, averaged over heads."""
        query, key = (tensor.float() for tensor in self._query_and_key(layer, x))
        value = torch.zeros(*key.shape[:3], ROLLOUT_WIDTH, device=x.device, requires_grad=True)
        seed = torch.zeros_like(value)
        seed[..., 0] = share[:, None]
        with torch.enable_grad():
            output = attention(query, key, value, layer.self_attn.pattern, key_padding_mask=mask)  # pyrefly: ignore
            (grad,) = torch.autograd.grad(output, value, seed)
        return grad[..., 0].mean(1)

    def _query_and_key(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(layer, DilatedTransformerEncoderLayer)
        entering = layer.get_submodule("norm1")(x)
        query, key, _ = layer.self_attn.project(entering, entering, entering)
        return query, key

    def _tokens(self, tiles: Tensor, coords: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The class token and the tiles, with their positions, and the mask of both."""
        if tiles.dim() != 3 or tiles.shape[-1] != self.config.tile_width:
            raise must(f"tiles must have shape (batch, n, {self.config.tile_width})", tuple(tiles.shape))
        if coords.shape != (*tiles.shape[:2], 2):
            raise must(f"coords must have shape {(*tiles.shape[:2], 2)}", tuple(coords.shape))
        if mask is not None and (mask.dtype != torch.bool or mask.shape != tiles.shape[:2]):
            raise must(f"key_padding_mask must be bool {tuple(tiles.shape[:2])}", f"{mask.dtype} {tuple(mask.shape)}")
        if not torch.compiler.is_compiling() and not tiles.is_meta and (world := world_of(self.encoder)) > 1:
            raise must("a slide must lie on one rank", f"{world} ranks", "Distribute whole slides.")
        if self.config.global_pool and not tiles.is_meta:
            what, do = "every slide must have a tile with global_pool=True", "Remove slides without tiles."
            if not tiles.shape[1]:
                raise must(what, "slides without tiles", do)
            if mask is not None:
                tiles = require(tiles, ~mask.all(1).any(), what, lambda: "a slide whose tiles are all padding", do)
        cells = torch.floor(coords.double() / self.config.tile_size)
        if mask is not None:
            cells = cells.masked_fill(mask[..., None], 0.0)
        cells = self._within_grid(cells)
        x = self.tile_projection(tiles)
        table = axis_positions(self.config.grid, self.config.d_model // 2, x.device).to(x.dtype)
        # The first half of a position encodes the second coordinate, the other half the first.
        x = x + nn.functional.embedding(cells.long().flip(-1), table).flatten(-2)
        if mask is not None:
            x = x.masked_fill(mask[..., None], 0.0)
            mask = nn.functional.pad(mask, (1, 0), value=False)
        # The class token has no cell: its position is zero.
        return self.dropout(torch.cat([self.class_token.to(x.dtype).expand(len(x), -1, -1), x], 1)), mask

    def _within_grid(self, cells: Tensor) -> Tensor:
        if cells.is_meta or not cells.numel():
            return cells
        low, high = cells.amin((0, 1)), cells.amax((0, 1))
        cells = require(
            cells,
            (low >= 0).all() & (high < self.config.grid).all(),
            f"coords must lie in 0 .. {self.config.grid * self.config.tile_size - 1} pixels",
            lambda: f"cells {low.tolist()} .. {high.tolist()} of {self.config.tile_size} pixels",
            "Give pixels at full resolution, counted from the slide's corner.",
        )
        if not torch.compiler.is_compiling() and 2 * float((high - low + 1).prod()) < cells.shape[1]:
            warnings.warn(
                f"{cells.shape[1]} tiles lie within {int((high - low + 1).prod())} cells of the grid: coords must be "
                f"pixels at full resolution, {self.config.tile_size} to a tile, not normalised values",
                stacklevel=4,
            )
        return cells

    def _pooled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not self.config.global_pool:
            return self.norm(x[:, 0])
        if mask is None:
            return self.norm(x[:, 1:].mean(1))
        real = (~mask[:, 1:]).to(x.dtype)[..., None]
        return self.norm((x[:, 1:] * real).sum(1) / real.sum(1))
