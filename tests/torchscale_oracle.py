"""torchscale's LongNet, slowly and in float64: what its sources say, step by step, without this library.

Segments are cut, filled up with zeros, thinned by rows and head groups, attended densely, and mixed by their
denominators; nothing here knows of patterns, plans or multiplicities.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def norm(state: State, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    if f"{name}.weight" not in state:
        assert name in ("self_attn.inner_attn_ln", "ffn.ffn_layernorm"), "a model without --subln lacks these alone"
        return x
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def branch(q: Tensor, k: Tensor, v: Tensor, segment: int, rate: int, causal: bool) -> tuple[Tensor, Tensor]:
    """One branch of one sample, (n, heads, d): outputs, and log-denominators that are -inf where not sampled.

    Filled segments are laid one after another and cut to n rows: the fill is never taken out.
    """
    n, heads, d = q.shape
    segment = min(segment, n)
    group = -(-heads // rate)
    output, lse = torch.zeros_like(q), torch.full((n, heads), -math.inf, dtype=q.dtype)
    width = -(-segment // rate) * rate
    for number, start in enumerate(range(0, n, segment)):
        filled = []
        for x in (q, k, v):
            piece = x[start : start + segment]
            filled.append(F.pad(piece, (0, 0, 0, 0, 0, width - len(piece))))
        for head in range(heads):
            rows = range(head // group, width, rate)
            qs, ks, vs = (x[rows, head] for x in filled)
            scores = qs @ ks.T / math.sqrt(d)
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            found, total = scores.softmax(-1) @ vs, scores.logsumexp(-1)
            for index, row in enumerate(rows):
                if (place := number * width + row) < n:
                    output = output.index_put((torch.tensor(place), torch.tensor(head)), found[index])
                    lse = lse.index_put((torch.tensor(place), torch.tensor(head)), total[index])
    return output, lse


def attention(q: Tensor, k: Tensor, v: Tensor, segments: list[int], rates: list[int], causal: bool) -> Tensor:
    outputs, lses = zip(*(branch(q, k, v, w, r, causal) for w, r in zip(segments, rates, strict=True)), strict=True)
    with torch.no_grad():
        weights = torch.stack(lses).softmax(0).nan_to_num(0.0)
    return sum(o * w[..., None] for o, w in zip(outputs, weights, strict=True))


def xpos(x: Tensor, scale_base: int, downscale: bool) -> Tensor:
    """Neighbouring entries (n, heads, d) turned and scaled by their position."""
    n, _, d = x.shape
    even = torch.arange(0, d, 2, dtype=x.dtype)
    first = -(n // 2)
    position = torch.arange(n, dtype=x.dtype)
    power = (position + first)[:, None] / scale_base
    factor = ((even + 0.4 * d) / (1.4 * d)) ** power
    factor = 1 / factor if downscale else factor
    angle = position[:, None] * 10000 ** -(torch.arange(d // 2, dtype=x.dtype) / (d // 2))
    cos, sin = ((f * factor).repeat_interleave(2, -1)[:, None] for f in (angle.cos(), angle.sin()))
    other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + other * sin


def layer(
    state: State,
    x: Tensor,
    heads: int,
    segments: list[int],
    rates: list[int],
    causal: bool,
    with_xpos: bool,
    memory: Tensor | None = None,
) -> Tensor:
    """(n, e) through one layer; `state` holds its names without the layer's prefix."""
    y = norm(state, "self_attn_layer_norm", x)
    q, k, v = (linear(state, f"self_attn.{n}_proj", y).unflatten(-1, (heads, -1)) for n in "qkv")
    if with_xpos:
        q, k = xpos(q, 512, False), xpos(k, 512, True)
    y = attention(q, k, v, segments, rates, causal).flatten(1)
    x = x + linear(state, "self_attn.out_proj", norm(state, "self_attn.inner_attn_ln", y))
    if memory is not None:
        y = norm(state, "encoder_attn_layer_norm", x)
        q, k, v = (
            linear(state, f"encoder_attn.{n}_proj", given).unflatten(-1, (heads, -1)).transpose(0, 1)
            for n, given in (("q", y), ("k", memory), ("v", memory))
        )
        y = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        x = x + linear(state, "encoder_attn.out_proj", y.transpose(0, 1).flatten(1))
    y = F.gelu(linear(state, "ffn.fc1", norm(state, "final_layer_norm", x)))
    return x + linear(state, "ffn.fc2", norm(state, "ffn.ffn_layernorm", y))


def stack(state: State, prefix: str, x: Tensor, *settings: object) -> Tensor:
    number = 0
    while any(name.startswith(f"{prefix}layers.{number}.") for name in state):
        own = f"{prefix}layers.{number}."
        x = layer({n.removeprefix(own): t for n, t in state.items() if n.startswith(own)}, x, *settings)
        number += 1
    return norm(state, f"{prefix}layer_norm", x)


def decoder(
    state: State, tokens: Tensor, heads: int, segments: list[int], rates: list[int], fairseq: bool = False
) -> Tensor:
    with_xpos = "layers.0.self_attn.xpos.scale" in state
    x = state["embed_tokens.weight"][tokens]
    if fairseq:
        half = x.shape[1] // 2
        rows = []
        for token in range(len(tokens)):
            angles = [(token + 2) * 10000 ** (-i / (half - 1)) for i in range(half)]
            rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        x = x * math.sqrt(x.shape[1]) + torch.tensor(rows, dtype=x.dtype)
    x = stack(state, "", x, heads, segments, rates, True, with_xpos)
    return x @ state["output_projection.weight"].T


def encoder_decoder(
    state: State, src: Tensor, tgt: Tensor, heads: int, segments: list[int], rates: list[int]
) -> Tensor:
    ladder = heads, segments, rates
    memory = stack(state, "encoder.", state["encoder.embed_tokens.weight"][src], *ladder, False, False)
    x = stack(state, "decoder.", state["decoder.embed_tokens.weight"][tgt], *ladder, True, False, memory)
    return x @ state["decoder.output_projection.weight"].T


def positions(width: int, grid: int) -> Tensor:
    """The table of the published encoder: row 0 for the class token, then cell (i, j) at 1 + i * grid + j."""
    rate = 1 / 10000 ** (torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    rows = [torch.zeros(width, dtype=torch.float64)]
    for i in range(grid):
        for j in range(grid):
            rows.append(torch.cat([(j * rate).sin(), (j * rate).cos(), (i * rate).sin(), (i * rate).cos()]))
    return torch.stack(rows)


def slide(
    state: State,
    tiles: Tensor,
    coords: Tensor,
    heads: int,
    segments: list[int],
    rates: list[int],
    grid: int,
    pool: bool,
) -> Tensor:
    table = positions(state["cls_token"].shape[-1], grid)
    cell = (coords // 256).long()
    x = linear(state, "patch_embed.proj", tiles) + table[cell[:, 0] * grid + cell[:, 1] + 1]
    x = torch.cat([state["cls_token"][0], x])
    x = stack(state, "encoder.", x, heads, segments, rates, False, False)
    return norm(state, "norm", x[1:].mean(0), 1e-6) if pool else norm(state, "norm", x[0], 1e-6)


def layer_shapes(
    d: int, wide: int, prefix: str, head_dim: int | None = None, cross: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer with sub-LayerNorm, which stands in self-attention and not in `cross`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (out, inside) in {
        **{f"self_attn.{n}_proj": (d, d) for n in ("k", "v", "q", "out")},
        **{f"encoder_attn.{n}_proj": (d, d) for n in ("k", "v", "q", "out") if cross},
        "ffn.fc1": (wide, d),
        "ffn.fc2": (d, wide),
    }.items():
        shapes |= {f"{prefix}{name}.weight": (out, inside), f"{prefix}{name}.bias": (out,)}
    for name, width in {
        "self_attn.inner_attn_ln": d,
        "self_attn_layer_norm": d,
        **({"encoder_attn_layer_norm": d} if cross else {}),
        "ffn.ffn_layernorm": wide,
        "final_layer_norm": d,
    }.items():
        shapes |= {f"{prefix}{name}.weight": (width,), f"{prefix}{name}.bias": (width,)}
    if head_dim is not None:
        shapes[f"{prefix}self_attn.xpos.scale"] = (head_dim // 2,)
    return shapes


def drawn(shapes: dict[str, tuple[int, ...]]) -> State:
    """Random weights in float64, near 1 for norms."""
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, dtype=torch.float64)
        about_one = len(shape) == 1 and name.endswith(".weight")
        state[name] = 1 + 0.1 * noise if about_one else noise / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1 * noise
        if name.endswith("xpos.scale"):
            even = torch.arange(0, 2 * shape[0], 2, dtype=torch.float64)
            state[name] = (even + 0.8 * shape[0]) / (2.8 * shape[0])
    return state


def slide_state(d: int, wide: int, layers: int, tile_width: int) -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, d),
        "patch_embed.proj.weight": (d, tile_width),
        "patch_embed.proj.bias": (d,),
        "norm.weight": (d,),
        "norm.bias": (d,),
        "encoder.layer_norm.weight": (d,),
        "encoder.layer_norm.bias": (d,),
    }
    for number in range(layers):
        shapes |= layer_shapes(d, wide, f"encoder.layers.{number}.")
    return drawn(shapes)


def decoder_state(d: int, wide: int, layers: int, heads: int, vocabulary: int, with_xpos: bool) -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, d),
        "layer_norm.weight": (d,),
        "layer_norm.bias": (d,),
    }
    for number in range(layers):
        shapes |= layer_shapes(d, wide, f"layers.{number}.", d // heads if with_xpos else None)
    state = drawn(shapes)
    return {**state, "output_projection.weight": state["embed_tokens.weight"]}


def encoder_decoder_state(d: int, wide: int, layers: tuple[int, int], vocabularies: tuple[int, int]) -> State:
    """Encoder and decoder with embeddings of their own and an output projection that shares with neither."""
    shapes: dict[str, tuple[int, ...]] = {"decoder.output_projection.weight": (vocabularies[1], d)}
    for side, count, vocabulary in zip(("encoder", "decoder"), layers, vocabularies, strict=True):
        shapes |= {f"{side}.embed_tokens.weight": (vocabulary, d)}
        shapes |= {f"{side}.layer_norm.{kind}": (d,) for kind in ("weight", "bias")}
        for number in range(count):
            shapes |= layer_shapes(d, wide, f"{side}.layers.{number}.", cross=side == "decoder")
    return drawn(shapes)
