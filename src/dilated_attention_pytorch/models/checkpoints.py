"""Weights in and out of files, under the names of this library and of others.

What a file holds is checked whole before a parameter changes, so a model is loaded or left as it was. A torch file is
read with `weights_only=True`, which runs no code from it.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..atomic_write import write_whole
from ..errors import must, must_be
from ..nn import MultiheadSparseAttention, Rotary, Xpos
from .config import LongNetConfig
from .layers import DilatedTransformerDecoderLayer
from .longnet import LongNet, LongNetLM
from .slide import SlideConfig, SlideEncoder

Names = Literal["own", "torchscale", "torch", "original"]
State = dict[str, Tensor]
Source = Mapping[str, Any] | str | os.PathLike[str]

WRAPPERS = ("model", "state_dict", "module")
"""Keys under which trainers put a state dict inside a file."""
MOST_WRAPPERS = 8
"""A file may name itself as what it wraps, and has no end then."""
SAFETENSORS_MISSING = "a .safetensors file must be read with the package safetensors"

# What stands in one of our names, and what stands there in theirs; the first that fits a name is taken. Layers of a
# decoder with cross-attention have a third norm, so they come first.
_TORCHSCALE_LAYER = {
    r"(layers\.\d+\.)self_attn\.norm\.": r"\1self_attn.inner_attn_ln.",
    r"(layers\.\d+\.)multihead_attn\.": r"\1encoder_attn.",
    r"(layers\.\d+\.)linear1\.": r"\1ffn.fc1.",
    r"(layers\.\d+\.)linear2\.": r"\1ffn.fc2.",
    r"(layers\.\d+\.)norm1\.": r"\1self_attn_layer_norm.",
}
_TWO_BLOCKS = {
    r"(layers\.\d+\.)norm2\.": r"\1final_layer_norm.",
    r"(layers\.\d+\.)norm3\.": r"\1ffn.ffn_layernorm.",
}
_THREE_BLOCKS = {
    r"(decoder\.layers\.\d+\.)norm2\.": r"\1encoder_attn_layer_norm.",
    r"(decoder\.layers\.\d+\.)norm3\.": r"\1final_layer_norm.",
    r"(decoder\.layers\.\d+\.)norm4\.": r"\1ffn.ffn_layernorm.",
}
_FUSED = {"in_proj_weight": "weight", "in_proj_bias": "bias", "qkv_proj.weight": "weight", "qkv_proj.bias": "bias"}
"""Names of the three projections in one -> what each of the three is called."""
_SOURCE = "encoder.embed_tokens.weight"
"""Name of the embedding of encoder tokens in torchscale."""
_CONSTANTS = re.compile(r"(^|\.)(xpos\.scale|pos_embedding\.scale|pos_embed)$")
"""Entries that follow from the sizes and are computed here."""

_SINK = re.compile(r"(^|\.)sink$")
_FAIRSEQ = re.compile(r"^decoder\.(version|embed_positions\._float_tensor)$")
"""Entries of fairseq's models that hold no weights."""


def read_state(path: str | os.PathLike[str]) -> State:
    """Tensors by name, from a safetensors or torch file; anything else in it is refused."""
    return read_with_facts(path)[0]


def read_with_facts(path: str | os.PathLike[str], *names: str) -> tuple[State, dict[str, Any]]:
    """Tensors by name, and those of the named facts of `write_state` that are present."""
    source = Path(path)
    if not source.is_file():
        raise must("a checkpoint must be a file", source)
    if source.suffix == ".safetensors":
        return _read_safetensors(source, names)
    found = read_torch(source)
    facts = {name: found[name] for name in names if isinstance(found, Mapping) and name in found}
    state = state_in(found)
    check_stored(state)
    return state, facts


def read_torch(path: Path, device: torch.device | str = "cpu") -> Any:
    """Content of a torch file of tensors and plain values."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        # Damaged archives and forbidden pickles fail in many ways, none of which may leave half a checkpoint.
        raise must("a checkpoint must be a whole torch file of tensors alone", f"{path.name}: {_first_line(error)}",
                   "Files that need code to be read are not opened. Save a state dict.") from error  # fmt: skip


def check_stored(state: State) -> None:
    """Refuse tensors that claim more elements than their memory holds, as an expanded one does."""
    views = [name for name, t in state.items() if t.numel() * t.element_size() > t.untyped_storage().nbytes()]
    if views:
        shown = ", ".join(f"{name} {tuple(state[name].shape)}" for name in views[:8])
        raise must("tensors of a checkpoint must be stored whole", f"expanded ones: {shown}", "Clone them.")


def state_in(found: Any) -> State:
    """The state dict in what a file held, taken out of what trainers wrap it in."""
    for _ in range(MOST_WRAPPERS):
        wrapped = [
            found[name] for name in WRAPPERS if isinstance(found, Mapping) and isinstance(found.get(name), Mapping)
        ]
        if not wrapped:
            break
        found = wrapped[0]
    if not isinstance(found, Mapping):
        raise must_be("a checkpoint must hold a dictionary of tensors", type(found).__name__)
    others = [str(name) for name, entry in found.items() if not isinstance(name, str) or not isinstance(entry, Tensor)]
    if others or not found:
        came = f"{', '.join(others[:8])} besides" if others else "nothing"
        raise must("a checkpoint must hold tensors by name", came, f"Wrap a state dict as {{{WRAPPERS[0]!r}: ...}}.")
    # Nothing bounds the size of a tensor without values, or of a sparse one.
    odd = [name for name, t in found.items() if t.is_meta or t.is_nested or t.is_quantized or t.layout != torch.strided]
    if odd:
        raise must("tensors of a checkpoint must be dense and have values", f"others: {', '.join(odd[:8])}")
    return dict(found)


def _read_safetensors(source: Path, names: Sequence[str]) -> tuple[State, dict[str, Any]]:
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise must(SAFETENSORS_MISSING, "none installed", "pip install safetensors") from error
    try:
        with safe_open(source, "pt") as opened:
            metadata = opened.metadata() or {}
        return load_file(source), {name: json.loads(metadata[name]) for name in names if name in metadata}
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise must("a checkpoint must be a whole safetensors file", f"{source.name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def write_state(
    state: Mapping[str, Tensor], path: str | os.PathLike[str], facts: Mapping[str, Any] | None = None
) -> None:
    """Write tensors to a `.safetensors` or a torch file, which is there whole or not at all.

    Args:
        state: tensors by name.
        path: the file.
        facts: plain values, as JSON has them, to be kept besides.
    """
    source = Path(path)
    # Tied tensors share memory, which safetensors will not write; and a view would drag its whole base along.
    own = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    if source.suffix == ".safetensors":
        try:
            from safetensors.torch import save_file
        except ModuleNotFoundError as error:
            raise must(SAFETENSORS_MISSING, "none installed", "pip install safetensors, or write a .pt file") from error
        metadata = {name: json.dumps(fact) for name, fact in facts.items()} if facts else None
        write_whole(source, lambda temporary: save_file({n: t.cpu() for n, t in own.items()}, temporary, metadata))
    else:
        write_torch({WRAPPERS[0]: own, **facts} if facts else own, source)


def write_torch(state: object, path: Path) -> None:
    """Write what `torch.load(..., weights_only=True)` reads back, whole or not at all; a full disk is an `OSError`."""

    def write(temporary: str) -> None:
        try:
            with open(temporary, "wb") as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:
            # torch closes its archive, finds it short, and raises that instead.
            fault = error if isinstance(error, OSError) else error.__context__
            if isinstance(fault, OSError):
                raise OSError(*fault.args[:2], str(path)) from None
            raise

    write_whole(path, write)


def load_checkpoint(model: nn.Module, source: Source, names: Names = "own", *, ignore: Sequence[str] = ()) -> None:
    """Load a model from a file or a state dict, all of it or nothing.

    Args:
        model: a model of this library.
        source: a path, or tensors by name.
        names: whose names they have: "own", "torchscale" (its DilatedAttention, its LongNet, and the slide encoder
            built on it), "torch" (nn.TransformerEncoder), or "original" (the modules that this library's names come
            from, in both of their lines). An original LongNet computed another attention: its weights load, with a
            warning where norms differ, and its numbers are not reproduced.
        ignore: regular expressions of entries to leave out.
    """
    given = read_state(source) if isinstance(source, str | os.PathLike) else state_in(source)
    given = {name: tensor for name, tensor in given.items() if not any(re.search(out, name) for out in ignore)}
    if names != "own":
        given = {name: tensor for name, tensor in given.items() if not _CONSTANTS.search(name)}
    expected = model.state_dict()
    theirs = {own: _their_name(model, own, names) for own in expected}
    loaded = _checked(expected, theirs, _completed(model, _apart(given), theirs, names))
    if names == "torchscale":
        loaded = {own: _transposed(model, own, tensor, False) for own, tensor in loaded.items()}
    if any(tensor.is_meta for tensor in expected.values()):
        advice = "Call model.to_empty(device=...) first."
        raise must("a model must have memory for its weights", "parameters on the meta device", advice)
    model.load_state_dict(loaded)


def export_state(model: nn.Module, names: Names = "own") -> State:
    """A model's weights under the names of others; `load_checkpoint` takes them back."""
    state = {own: tensor.detach().clone() for own, tensor in model.state_dict().items()}
    sinks = [own for own in state if _SINK.search(own)]
    if names != "own" and sinks:
        raise must(f"a model under {names}'s names must have no sinks", ", ".join(sinks[:8]))
    if names == "torchscale":
        state = {own: _transposed(model, own, tensor, True) for own, tensor in state.items()}
    state = {_their_name(model, own, names): tensor for own, tensor in state.items()}
    if names == "torchscale" and isinstance(model, LongNetLM):
        bias = state.pop(_their_name(model, "out.bias", names), None)
        if bias is not None and bool(bias.any()):
            raise must("torchscale's output projection must have no bias", "out.bias", "Set it to 0, or bias=False.")
        if _shares_with_encoder(model):
            state[_SOURCE] = state[_their_name(model, "token_embedding.weight", names)].clone()
    for own, module in model.named_modules() if names == "torchscale" else ():
        if isinstance(module, MultiheadSparseAttention) and isinstance(module.position, Xpos):
            width = module.head_dim
            scale = (torch.arange(0, width, 2, device="cpu") + 0.4 * width) / (1.4 * width)
            state[_their_name(model, f"{own}.xpos.scale".removeprefix("."), names)] = scale
    return _together(state) if names == "torch" else state


def _checked(expected: State, theirs: dict[str, str], given: State) -> State:
    """Tensors by our names, if they are all there, none too many, each of its shape."""
    missing = [name for own, name in theirs.items() if name not in given]
    unexpected = sorted(set(given) - set(theirs.values()))
    shapes = [
        f"{name} {tuple(given[name].shape)} for {tuple(expected[own].shape)}"
        for own, name in theirs.items()
        if name in given and given[name].shape != expected[own].shape
    ]
    kinds = [
        f"{name} {given[name].dtype} for {expected[own].dtype}"
        for own, name in theirs.items()
        if name in given and given[name].is_floating_point() != expected[own].is_floating_point()
    ]
    wrong = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "of another kind": kinds}
    if any(wrong.values()):
        came = "; ".join(f"{len(each)} {what}: {', '.join(each)}" for what, each in wrong.items() if each)
        raise must(
            "a checkpoint must hold what the model needs and nothing more", came, "Nothing was loaded; see `ignore`."
        )
    return {own: given[name] for own, name in theirs.items()}


def _completed(model: nn.Module, given: State, theirs: dict[str, str], names: Names) -> State:
    """`given` with what follows from the rest: shared embeddings, norms the original lacks, a bias torchscale lacks."""
    if isinstance(model, LongNetLM):
        embedding, out = theirs["token_embedding.weight"], theirs["out.weight"]
        if model.config.tie_embeddings and not {embedding, out}.isdisjoint(given):
            # safetensors' save_model stores either name of a shared tensor.
            shared = given[embedding if embedding in given else out]
            given = {embedding: shared, out: shared, **given}
            two = given[out].float(), given[embedding].float()
            if two[0].shape == two[1].shape and not torch.equal(*two):
                raise must("tied embeddings must be given equal embeddings", "two", "Set tie_embeddings=False.")
        if names == "torchscale" and _shares_with_encoder(model) and {_SOURCE, embedding} <= set(given):
            if not torch.equal(given[_SOURCE], given[embedding]):
                raise must("a model with one embedding must be given equal embeddings", "two", "Set num_source_tokens.")
            given = {name: tensor for name, tensor in given.items() if name != _SOURCE}
        if names == "torchscale" and "out.bias" in theirs:
            given = {theirs["out.bias"]: torch.zeros(model.config.num_tokens, device="cpu"), **given}
    if names != "own":
        # Sinks are this library's: one that was requested starts as it was made.
        given = {**{theirs[own]: x for own, x in model.state_dict().items() if _SINK.search(own)}, **given}
    return _with_norms(model, given, theirs) if names == "original" else given


def _with_norms(model: nn.Module, given: State, theirs: dict[str, str]) -> State:
    """An original state dict with the norms of this library.

    - The first line of the original has `norm` after attention, as here. The second has `q_ln` and `k_ln` on queries
      and keys, and applies `q_ln` after attention once more: `q_ln` is loaded as `norm`, and `k_ln` is left out.
    - Self-attention of a decoder has no norm in either line, except in the first releases; here it has one.
    - `LongNet` has no norm after its stacks, and `LongNetLM` has one after its decoder alone.

    Norms that the original does not have are 1 (weight) and 0 (bias).
    """
    keys = [name for name in given if re.search(r"(^|\.)k_ln\.(weight|bias)$", name)]
    given = {name: tensor for name, tensor in given.items() if name not in keys}
    given = {re.sub(r"(^|\.)q_ln\.(?=weight$|bias$)", r"\1norm.", name): tensor for name, tensor in given.items()}
    layer = "" if isinstance(model, DilatedTransformerDecoderLayer) else r"decoder\.layers\.\d+\."
    lacking = re.compile(rf"(long_net\.)?((en|de)coder\.norm|{layer}self_attn\.norm)\.(weight|bias)")
    new = {name: own for own, name in theirs.items() if lacking.fullmatch(name) and name not in given}
    if keys or new:
        warnings.warn(
            f"An original LongNet is not reproduced: {len(keys)} entries of norms of keys are left out, and {len(new)} "
            "entries of norms that it does not have are 1 (weight) and 0 (bias).",
            stacklevel=4,
        )
    expected = model.state_dict()
    made = {name: torch.full_like(expected[own], float(name.endswith("weight"))) for name, own in new.items()}
    return {**made, **given}


def _shares_with_encoder(model: LongNetLM) -> bool:
    """Whether one embedding serves both stacks, which torchscale stores under the names of both."""
    return model.config.form == "encoder-decoder" and model.source_embedding is None


def _apart(given: Mapping[str, Tensor]) -> State:
    """Projections stored as one, made three."""
    found: State = {}
    for name, tensor in given.items():
        fused = next((end for end in _FUSED if name.endswith(end)), None)
        if fused is None or not tensor.dim() or tensor.shape[0] % 3:
            found[name] = tensor
        else:
            base = name.removesuffix(fused)
            found |= {f"{base}{n}_proj.{_FUSED[fused]}": t for n, t in zip("qkv", tensor.chunk(3), strict=True)}
    return found


def _together(state: State) -> State:
    """The reverse, as nn.MultiheadAttention stores them."""
    found: State = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\.)([qkv])_proj\.(weight|bias)", name)
        if match is None:
            found[name] = tensor
        elif match[2] == "q":
            three = [state[f"{match[1]}{n}_proj.{match[3]}"] for n in "qkv"]
            found[f"{match[1]}in_proj_{match[3]}"] = torch.cat(three)
    return found


def _their_name(model: nn.Module, own: str, names: Names) -> str:
    """Name of a parameter in a checkpoint of another library."""
    if names not in get_args(Names):
        raise must(f"names must be one of {', '.join(get_args(Names))}", repr(names))
    if names == "own":
        return own
    if names == "torch":
        return own.removeprefix("encoder.")
    if names == "original":
        # A language model had one norm, after its decoder.
        return re.sub(r"^long_net\.decoder\.norm\.", "norm.", own)
    if ".multihead_attn.norm." in own:
        raise must("torchscale's cross-attention must have no LayerNorm inside", own, "Set memory_norm=False.")
    if isinstance(model, MultiheadSparseAttention):
        return re.sub(r"^norm\.", "inner_attn_ln.", own)
    table: dict[str, str] = dict(_TORCHSCALE_LAYER)
    if isinstance(model, SlideEncoder):
        ends = {r"^tile_projection\.": "patch_embed.proj.", r"^class_token$": "cls_token"}
        table |= {**_TWO_BLOCKS, r"^encoder\.norm\.": "encoder.layer_norm.", **ends}
    else:
        both = getattr(getattr(model, "config", None), "form", None) == "encoder-decoder"
        own = own.removeprefix("long_net.")
        own = own if both else re.sub(r"^(?:en|de)coder\.", "", own)
        prefix = "decoder." if both else ""
        table |= {
            **(_THREE_BLOCKS if both else {}),
            **_TWO_BLOCKS,
            r"^((?:(?:en|de)coder\.)?)norm\.": r"\1layer_norm.",
            r"^token_embedding\.": f"{prefix}embed_tokens.",
            r"^source_embedding\.": "encoder.embed_tokens.",
            r"^out\.": f"{prefix}output_projection.",
        }
    for ours, replacement in table.items():
        changed, times = re.subn(ours, replacement, own)
        if times:
            return changed
    return own


def _transposed(model: nn.Module, own: str, tensor: Tensor, out: bool) -> Tensor:
    """Query and key projections for rotary positions: torchscale turns neighbours, we turn the halves of a head."""
    match = re.fullmatch(r"(?:(.*)\.)?[qk]_proj\.(?:weight|bias)", own)
    if match is None:
        return tensor
    attention: Any = model.get_submodule(match[1] or "")
    if not isinstance(getattr(attention, "position", None), Rotary):
        return tensor
    heads = tensor.unflatten(0, (-1, attention.head_dim))
    shape = (2, attention.head_dim // 2) if out else (attention.head_dim // 2, 2)
    return heads.unflatten(1, shape).transpose(1, 2).flatten(1, 2).flatten(0, 1)


PUBLISHED_SLIDE_ENCODER = 768, 12
"""Width and layers of the slide encoder whose 16 heads are the default of `SlideConfig`."""


def load_slide_encoder(
    source: Source,
    *,
    exact: bool = False,
    ignore: Sequence[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> SlideEncoder:
    """A slide encoder with published weights, its sizes read from them.

    Args:
        source: a path, or tensors by name, as torchscale names them.
        exact: attend without torchscale's zero padding, which the weights were trained with: cleaner, not the same.
        ignore: see `load_checkpoint`.
        device: where it runs, as `dtype` in what.
        settings: fields of `SlideConfig` that do not follow from sizes, such as `global_pool` and `slide_size`.
            Weights do not hold the number of heads: `nhead` must be given unless they have the 12 layers of width 768
            of the published encoder, which has 16 heads.
    """
    state = read_state(source) if isinstance(source, str | os.PathLike) else state_in(source)
    sizes = _sizes(state, "encoder.", ("patch_embed.proj.weight",))
    fields: dict[str, Any] = {
        "tile_width": sizes["patch_embed.proj.weight"][1],
        "d_model": sizes["d_model"],
        "num_layers": sizes["layers"],
        "dim_feedforward": sizes["dim_feedforward"],
        "zero_padding": not exact,
        "detach_mixing": not exact,
    }
    if "nhead" not in settings and (fields["d_model"], fields["num_layers"]) != PUBLISHED_SLIDE_ENCODER:
        raise must(
            "nhead must be given: weights do not hold the number of heads",
            f"{fields['num_layers']} layers of width {fields['d_model']}, which are not the published ones",
            "load_slide_encoder(source, nhead=...).",
        )
    config = SlideConfig(**{**fields, **settings})
    _check_size(config.num_parameters, state)
    model = SlideEncoder(config, device=device, dtype=dtype)
    load_checkpoint(model, state, "torchscale", ignore=ignore)
    return model.eval()


def load_torchscale(
    source: Source,
    *,
    nhead: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    ignore: Sequence[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> LongNetLM:
    """A torchscale LongNet decoder or encoder-decoder as a `LongNetLM`, with the semantics it was trained with.

    Args:
        source: a path, or tensors by name: `embed_tokens.weight`, `layers.0. ...`, `layer_norm.weight` of a decoder;
            the same after `encoder.` and `decoder.` of both, which may share an embedding or not; or a decoder's after
            `decoder.`, as torchscale's fairseq models have it.
        nhead: heads, which sizes do not tell, as `segment_lengths` and `dilation_rates`.
        ignore: see `load_checkpoint`.
        device: where it runs, as `dtype` in what.
        settings: other fields of `LongNetConfig`, such as `activation`, "gelu" by default. Embeddings are taken as they
            are; models of its fairseq recipe, known by the buffer of fairseq's sinusoids, scale them and add sinusoids.
    """
    state = read_state(source) if isinstance(source, str | os.PathLike) else state_in(source)
    both = any(name.startswith("encoder.layers.") for name in state)
    sinusoids = "decoder.embed_positions._float_tensor" in state
    if not both and any(name.startswith("decoder.layers.") for name in state):
        state = {name.removeprefix("decoder."): tensor for name, tensor in state.items() if not _FAIRSEQ.search(name)}
    at = "decoder." if both else ""
    sizes = _sizes(state, at, (f"{at}embed_tokens.weight",))
    embedding, out = state[f"{at}embed_tokens.weight"], state.get(f"{at}output_projection.weight")
    fields: dict[str, Any] = {
        "num_tokens": len(embedding),
        "d_model": sizes["d_model"],
        "num_decoder_layers": sizes["layers"],
        "dim_feedforward": sizes["dim_feedforward"],
        "sub_norm": f"{at}layers.0.self_attn.inner_attn_ln.weight" in state,
        "position": "xpos" if f"{at}layers.0.self_attn.xpos.scale" in state else None,
        "tie_embeddings": out is None or torch.equal(out, embedding),
        "nhead": nhead,
        "segment_lengths": tuple(segment_lengths),
        "dilation_rates": tuple(dilation_rates),
        "offset": "block",
        "detach_mixing": True,
        "scale_embedding": sinusoids,
        "sinusoids": sinusoids,
    }
    if both:
        if "encoder.layers.0.self_attn.xpos.scale" in state:
            raise must("torchscale's XPOS must be in causal layers", "an encoder with it", "It is not run here.")
        read = state.get(_SOURCE, embedding)
        fields["num_source_tokens"] = None if torch.equal(read, embedding) else len(read)
        fields["num_encoder_layers"] = _sizes(state, "encoder.", ())["layers"]
        fields |= {"memory_norm": False, "zero_padding": True}
    config = LongNetConfig(**{**fields, **settings})
    # torchscale's output projection has no bias, which is set to 0 here.
    _check_size(config.num_parameters - config.num_tokens, state)
    model = LongNetLM(config, device=device, dtype=dtype)
    load_checkpoint(model, state, "torchscale", ignore=ignore)
    return model.eval()


def from_transformer_encoder(encoder: nn.TransformerEncoder, **settings: Any) -> LongNet:
    """A LongNet encoder with the weights of a `torch.nn.TransformerEncoder`, batch first.

    Args:
        encoder: torch's module.
        settings: fields of `LongNetConfig`, above all who sees whom: `segment_lengths` and `dilation_rates`, or
            `patterns=("full",)` for what torch computes.

    >>> layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> from_transformer_encoder(encoder, patterns=("window:16",))(torch.randn(1, 100, 64)).shape
    torch.Size([1, 100, 64])
    """
    layer: Any = encoder.layers[0]
    if not isinstance(layer, nn.TransformerEncoderLayer):
        raise must_be("encoder must have torch.nn.TransformerEncoderLayer layers", type(layer).__name__)
    eps = getattr(encoder.norm, "eps", layer.norm1.eps)
    if not layer.self_attn.batch_first or eps != layer.norm1.eps:
        came = "batch_first=False" if not layer.self_attn.batch_first else f"a last norm with eps {eps}"
        raise must("encoder must have batch_first=True and one epsilon in all norms", came)
    approximate = getattr(layer.activation, "approximate", "none")
    if approximate != "none":
        raise must("encoder must have the exact GELU or ReLU", f'GELU("{approximate}")')
    if type(layer.activation) is nn.ReLU or type(layer.activation) is nn.GELU:
        activation = type(layer.activation).__name__.lower()
    else:
        activation = getattr(layer.activation, "__name__", "unknown")
    sizes: dict[str, Any] = {
        "num_tokens": 1,
        "d_model": layer.linear1.in_features,
        "nhead": layer.self_attn.num_heads,
        "num_encoder_layers": len(encoder.layers),
        "num_decoder_layers": 0,
        "dim_feedforward": layer.linear1.out_features,
        "dropout": layer.dropout.p,
        "attention_dropout": layer.self_attn.dropout,
        "activation": activation,
        "layer_norm_eps": layer.norm1.eps,
        "norm_first": layer.norm_first,
        "final_norm": encoder.norm is not None,
        "sub_norm": False,
        "bias": layer.linear1.bias is not None,
        "position": None,
    }
    weight = layer.linear1.weight
    model = LongNet(LongNetConfig(**{**sizes, **settings}), device=weight.device, dtype=weight.dtype)
    load_checkpoint(model, encoder.state_dict(), "torch")
    return model.train(encoder.training)


def _sizes(state: State, prefix: str, also: Sequence[str]) -> dict[str, Any]:
    """Sizes of a torchscale stack, from the shapes of its tensors.

    Nothing is built for what a file only claims: every tensor is stored whole, and every layer is there.
    """
    check_stored(state)
    sizes = (f"{prefix}layers.0.ffn.fc1.weight", *also)
    missing = [name for name in sizes if name not in state or state[name].dim() != 2]
    if missing:
        raise must("a torchscale checkpoint must have its names", f"none called {', '.join(missing)}")
    wide, width = state[sizes[0]].shape
    numbers = {int(m[1]) for name in state if (m := re.match(rf"{re.escape(prefix)}layers\.(\d+)\.", name))}
    if max(numbers) + 1 != len(numbers):
        raise must(f"layers must be numbered from {prefix}layers.0 on", f"{len(numbers)} up to {max(numbers)}")
    shapes = {name: tuple(state[name].shape) for name in also}
    return {"d_model": width, "dim_feedforward": wide, "layers": max(numbers) + 1, **shapes}


def _check_size(parameters: int, state: State) -> None:
    """Refuse to build a model of more parameters than a checkpoint holds."""
    stored = sum(tensor.numel() for tensor in state.values())
    if parameters > stored:
        raise must(f"a checkpoint for {parameters:,} parameters must hold as many", f"{stored:,}", "See its shapes.")
