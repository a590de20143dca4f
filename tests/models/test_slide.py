"""The slide encoder: batches, padding, maps, rollout, memory, precision."""

from __future__ import annotations

import pytest
import torch
from live_memory import LiveMemory
from oracle import error, multiplicities

from dilated_attention_pytorch.models import SlideConfig, SlideEncoder
from dilated_attention_pytorch.tools.bench.measure import PeakMemory

SMALL = {
    "tile_width": 12,
    "d_model": 32,
    "num_layers": 3,
    "nhead": 4,
    "dim_feedforward": 48,
    "segment_lengths": (8, 32),
    "dilation_rates": (1, 2),
}


def slide(n: int, batch: int = 1, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    cells = torch.stack([torch.arange(n) // 8, torch.arange(n) % 8], -1)
    return torch.randn(batch, n, 12, dtype=dtype), (cells * 256).expand(batch, n, 2)


def test_the_defaults_are_the_published_encoder():
    config = SlideConfig()
    assert config.segments == (1024, 5792, 32768, 185363, 1048576)
    assert (config.num_layers, config.d_model, config.nhead) == (12, 768, 16)
    assert config.flops(10_000) > 12 * 2 * 10_000 * 12 * 768**2


@pytest.mark.parametrize("pool", [False, True])
def test_a_batch_is_its_slides_one_by_one(pool: bool):
    model = SlideEncoder(**SMALL, global_pool=pool, dtype=torch.float64)
    slides = [slide(n) for n in (50, 33, 1)]
    tiles, coords = (torch.nn.utils.rnn.pad_sequence([s[i][0] for s in slides], batch_first=True) for i in (0, 1))
    mask = torch.arange(50) >= torch.tensor([[50], [33], [1]])
    # What stands where there is no tile must not matter, were it not even on the slide.
    coords = coords.masked_fill(mask[..., None], -(10**9))
    together = model(tiles, coords, mask)
    layers = model(tiles, coords, mask, all_layers=True)
    assert layers.shape == (3, 4, 32)
    for row, each, (one, where) in zip(together, layers, slides, strict=True):
        assert error(row, model(one, where)[0]) < 1e-12
        assert error(each, model(one, where, all_layers=True)[0]) < 1e-12


def test_every_parameter_learns():
    model = SlideEncoder(**SMALL, gradient_checkpointing=True, dtype=torch.float64)
    model(*slide(40)).square().sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert [name for name in still if not name.endswith("k_proj.bias")] == []


def test_positions_are_sines_and_cosines_of_both_coordinates():
    model = SlideEncoder(tile_width=12, d_model=8, num_layers=1, nhead=2, dtype=torch.float64)
    x, _ = model._tokens(torch.zeros(1, 1, 12, dtype=torch.float64), torch.tensor([[[3 * 256 + 9, 5 * 256]]]), None)
    angles = torch.tensor([5.0, 5.0 / 100, 3.0, 3.0 / 100], dtype=torch.float64)
    wanted = torch.cat([angles[:2].sin(), angles[:2].cos(), angles[2:].sin(), angles[2:].cos()])
    assert error(x[0, 1], wanted) < 1e-14
    assert torch.equal(x[0, 0], model.class_token[0, 0])


def matrices(model: SlideEncoder, tiles: torch.Tensor, coords: torch.Tensor) -> list[torch.Tensor]:
    """Weights (heads, n, n) of every layer, densely."""
    x, _ = model._tokens(tiles, coords, None)
    found = []
    for layer in model.encoder.layers:
        y, attn = layer.norm1(x), layer.self_attn
        q, k = (p(y)[0].unflatten(-1, (4, 8)).transpose(0, 1) for p in (attn.q_proj, attn.k_proj))
        counts = multiplicities(attn.pattern, x.shape[1], 4)
        found.append((q @ k.mT / 8**0.5 + counts.log()).softmax(-1))
        x = layer(x)
    return found


def test_maps_and_rollout_are_those_of_the_dense_matrices():
    model = SlideEncoder(**SMALL, dtype=torch.float64)
    tiles, coords = slide(45)
    with torch.no_grad():
        dense = matrices(model, tiles, coords)
    found = model.attention_map(tiles, coords, [0, 44, 7], average_heads=False)
    assert found.shape == (1, 4, 3, 46)
    assert error(found[0], dense[-1][:, [1, 45, 8]]) < 1e-12
    assert error(model.attention_map(tiles, coords, 3, layer=0)[0], dense[0].mean(0)[[4]]) < 1e-12
    assert error(model.attention_map(tiles, coords)[0], dense[-1].mean(0)[[0]]) < 1e-12
    share = torch.eye(46, dtype=torch.float64)[0]
    for weights in reversed(dense):
        share = (share + share @ weights.mean(0)) / 2
    assert error(model.rollout(tiles, coords)[0], share) < 1e-6


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("zero_padding", [False, True])
def test_heat_maps_sum_to_one_and_leave_padding_out(pool: bool, zero_padding: bool):
    model = SlideEncoder(**SMALL, global_pool=pool, zero_padding=zero_padding)
    tiles, coords = slide(50, 2, torch.float32)
    mask = torch.arange(50) >= torch.tensor([[50], [29]])
    rows = model.attention_map(tiles, coords, [0, 20], mask)
    assert torch.allclose(rows.sum(-1), torch.ones(2, 2), atol=1e-5)
    assert (rows[1, :, 30:] == 0).all()
    share = model.rollout(tiles, coords, mask)
    assert torch.allclose(share.sum(-1), torch.ones(2), atol=1e-5)
    assert (share[1, 30:] == 0).all()
    assert (share >= 0).all()


def test_maps_leave_the_mode_alone():
    model = SlideEncoder(**SMALL, dropout=0.5).train()
    tiles, coords = slide(20, dtype=torch.float32)
    assert torch.equal(model.rollout(tiles, coords), model.rollout(tiles, coords))
    assert torch.equal(model.attention_map(tiles, coords, 3), model.attention_map(tiles, coords, 3))
    assert model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_nearly_the_same(dtype: torch.dtype):
    model = SlideEncoder(**SMALL)
    tiles, coords = slide(60, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(tiles, coords)
        got = model.to(dtype)(tiles.to(dtype), coords)
    assert got.dtype == dtype
    assert (got.float() - wanted).abs().max() < 0.1 * wanted.abs().max()


@pytest.mark.parametrize(
    ("tiles", "coords", "message"),
    [
        (torch.zeros(1, 5, 11), torch.zeros(1, 5, 2), "tiles must have shape"),
        (torch.zeros(1, 5, 12), torch.zeros(1, 4, 2), "coords must have shape"),
        (torch.zeros(1, 5, 12), torch.full((1, 5, 2), 256_000), "coords must lie in 0 .. 255999 pixels"),
        (torch.zeros(1, 5, 12), torch.full((1, 5, 2), -1), "coords must lie in"),
    ],
)
def test_bad_slides_are_refused(tiles: torch.Tensor, coords: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        SlideEncoder(**SMALL)(tiles, coords)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_coords_off_the_grid_are_refused_when_compiled():
    model = SlideEncoder(**SMALL, dtype=torch.float64).eval()
    compiled = torch.compile(model, backend="aot_eager")
    tiles, coords = slide(16)
    assert error(compiled(tiles, coords), model(tiles, coords).detach()) < 1e-12
    with pytest.raises(ValueError, match="coords must lie in"):
        compiled(tiles, coords - 256)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pooling_padding_alone_is_refused_when_compiled():
    model = SlideEncoder(**SMALL, global_pool=True, dtype=torch.float64).eval()
    compiled = torch.compile(model, backend="aot_eager")
    tiles, coords = slide(9, batch=2)
    padded = torch.arange(9).expand(2, 9) > 5
    assert error(compiled(tiles, coords, padded), model(tiles, coords, padded).detach()) < 1e-12
    with pytest.raises(ValueError, match="every slide must have a tile"):
        compiled(tiles, coords, padded | torch.tensor([[False], [True]]))


def test_pooling_no_tiles_is_refused():
    """Their mean is no number; a class token still has an embedding."""
    tiles, coords = slide(9, batch=2)
    none = torch.tensor([[False], [True]]).expand(2, 9)
    pooled, plain = (SlideEncoder(**SMALL, global_pool=pool, dtype=torch.float64) for pool in (True, False))
    for attempt in (
        lambda: pooled(tiles, coords, none),
        lambda: pooled.rollout(tiles, coords, none),
        lambda: pooled(tiles[:, :0], coords[:, :0]),
    ):
        with pytest.raises(ValueError, match="every slide must have a tile"):
            attempt()
    assert plain(tiles, coords, none).isfinite().all()
    assert plain.attention_map(tiles, coords, []).shape == (2, 0, 10)


def test_normalised_coordinates_are_noticed():
    with pytest.warns(UserWarning, match="coords must be pixels at full resolution"):
        SlideEncoder(**SMALL)(torch.randn(1, 100, 12), torch.rand(1, 100, 2) * 1000)


@pytest.mark.parametrize("tile", [45, -1, [3, 99]])
def test_tiles_that_are_not_there(tile: int | list[int]):
    with pytest.raises(ValueError, match=r"tile must lie in 0 \.\. 44"):
        SlideEncoder(**SMALL).attention_map(*slide(45, dtype=torch.float32), tile)


def test_ten_thousand_tiles_fit_in_four_gigabytes():
    """Layers run one after another, so all but two of the twelve add their parameters alone."""
    model = SlideEncoder(num_layers=2)
    layers = SlideConfig().num_layers
    assert layers == 12
    left_out = (layers - 2) * sum(p.numel() * p.element_size() for p in model.encoder.layers[0].parameters())
    tiles = torch.randn(1, 10_000, 1536)
    coords = 256 * torch.stack([torch.arange(10_000) // 100, torch.arange(10_000) % 100], -1)[None]
    with torch.no_grad():
        # What a first call loads and builds is not the slide's.
        model(tiles[:, :500], coords[:, :500])
        with PeakMemory("cpu") as peak:
            found = model(tiles, coords)
    assert found.isfinite().all()
    if peak.total is None:
        pytest.skip("the system does not report memory")
    assert peak.total + left_out < 4 * 2**30


def test_a_forward_pass_holds_what_was_predicted():
    model = SlideEncoder(tile_width=12, d_model=64, num_layers=3, nhead=4).eval()
    tiles, coords = slide(1500, dtype=torch.float32)
    with torch.no_grad():
        # The plan stays when the first call has made it.
        model(tiles, coords)
        with LiveMemory(*model.parameters(), tiles) as memory:
            model(tiles, coords)
    predicted = model.config.memory(1500)
    assert abs(memory.peak - predicted) < 0.05 * predicted
