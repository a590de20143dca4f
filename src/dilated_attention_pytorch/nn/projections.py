"""Projections before and after attention, and what they share with `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import must, must_be

Own = TypeVar("Own", bound="Projections")


class _NoTensor:
    """What torch's fused paths meet where they look for a weight; it handles torch functions, so they turn back."""

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        return NotImplemented


class Projections(nn.Module):
    """The parameters of a multihead module: `q_proj`, `k_proj`, `v_proj`, `out_proj` and perhaps `norm`."""

    dropout: float
    # nn.TransformerEncoderLayer has a fused path for inference that reads nn.MultiheadAttention's weights and never
    # calls a module put in its place, and nn.TransformerEncoder one that nests padded sequences. These keep both off.
    in_proj_weight = _NoTensor()
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        kdim: int | None,
        vdim: int | None,
        bias: bool,
        norm_eps: float | None,
        gamma_init: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise must("embed_dim must be a multiple of num_heads", f"{embed_dim} and {num_heads}")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise must("num_heads must be a multiple of num_kv_heads", f"{num_heads} and {kv_heads}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = (embed_dim if width is None else width for width in (kdim, vdim))
        self.gamma_init = gamma_init
        kept: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_width = kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **kept)
        self.k_proj = nn.Linear(self.kdim, kv_width, bias, **kept)
        self.v_proj = nn.Linear(self.vdim, kv_width, bias, **kept)
        self.norm = None if norm_eps is None else nn.LayerNorm(embed_dim, norm_eps, bias=bias, **kept)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **kept)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections anew."""
        gains = (
            (self.q_proj, 1.0),
            (self.k_proj, 1.0),
            (self.v_proj, self.gamma_init),
            (self.out_proj, self.gamma_init),
        )
        for projection, gain in gains:
            nn.init.xavier_uniform_(projection.weight, gain)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of the three, (B, H, N, D): in one product where they are one tensor, longer than it is wide."""
        three = (self.q_proj, self.k_proj, self.v_proj)
        # Laying the weights together costs more than it saves for a few tokens, and a traced length may be a symbol.
        many = not torch.compiler.is_compiling() and query.shape[0] * query.shape[1] > self.embed_dim
        if many and query is key is value and all(_plain(projection) for projection in three):
            bias = None if self.q_proj.bias is None else torch.cat([projection.bias for projection in three])
            joined = F.linear(query, torch.cat([projection.weight for projection in three]), bias)
            found = joined.split([projection.out_features for projection in three], -1)
        else:
            found = [projection(tensor) for projection, tensor in zip(three, (query, key, value), strict=True)]
        q, k, v = (tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for tensor in found)
        return q, k, v

    def finish(self, found: Tensor) -> Tensor:
        """What attention found, (B, H, N, D), normalised where asked for and projected to (B, N, E)."""
        output = found.transpose(1, 2).flatten(2)
        return self.out_proj(output if self.norm is None else self.norm(output))

    @classmethod
    def from_torch(cls: type[Own], mha: nn.MultiheadAttention, *pattern: Any, **options: Any) -> Own:
        """A module with the weights of a `torch.nn.MultiheadAttention`; `pattern` is what `cls` takes after the heads.

        >>> from dilated_attention_pytorch import MultiheadDilatedAttention
        >>> mha = nn.MultiheadAttention(64, 4, batch_first=True)
        >>> MultiheadDilatedAttention.from_torch(mha, [32, 64], [1, 2]).num_heads
        4
        """
        if not isinstance(mha, nn.MultiheadAttention):
            raise must_be("from_torch must be given a torch.nn.MultiheadAttention", type(mha).__name__)
        if has_keys_of_its_own(mha):
            raise must("from_torch must be given a module without add_bias_kv and add_zero_attn", "one with them")
        taken: dict[str, Any] = {
            "dropout": mha.dropout,
            "bias": mha.out_proj.bias is not None,
            "layer_norm": False,
            "kdim": mha.kdim,
            "vdim": mha.vdim,
            "batch_first": mha.batch_first,
            "device": mha.out_proj.weight.device,
            "dtype": mha.out_proj.weight.dtype,
        }
        own = cls(mha.embed_dim, mha.num_heads, *pattern, **{**taken, **options})
        # Only a LayerNorm that was asked for here has nothing to load.
        own.load_state_dict({**own.state_dict(), **_renamed(mha.state_dict(), "")})
        return own.train(mha.training)

    def torch_state_dict(self) -> dict[str, Tensor]:
        """The weights as `torch.nn.MultiheadAttention` names them."""
        if self.norm is not None or self.num_kv_heads != self.num_heads:
            came = "sub-LayerNorm" if self.norm is not None else f"{self.num_kv_heads} key heads"
            raise must("nn.MultiheadAttention must find all it needs and nothing more", came)
        three = (self.q_proj, self.k_proj, self.v_proj)
        state = {"out_proj.weight": self.out_proj.weight}
        if len({projection.in_features for projection in three}) == 1:
            state["in_proj_weight"] = torch.cat([projection.weight for projection in three])
        else:
            state |= {f"{n}_proj_weight": projection.weight for n, projection in zip("qkv", three, strict=True)}
        if self.out_proj.bias is not None:
            state["in_proj_bias"] = torch.cat([projection.bias for projection in three])
            state["out_proj.bias"] = self.out_proj.bias
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _load_from_state_dict(  # pyrefly: ignore[bad-override]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        state = _renamed(state_dict, prefix)
        state_dict.clear()
        state_dict.update(state)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def has_keys_of_its_own(mha: nn.MultiheadAttention) -> bool:
    """Whether it adds keys that no token gave, which no pattern speaks of."""
    return mha.bias_k is not None or mha.add_zero_attn


def _plain(projection: nn.Module) -> bool:
    """Whether calling it does no more than multiply: no hooks, no adapter or parametrisation in its place."""
    hooks = (
        projection._forward_hooks,
        projection._forward_pre_hooks,
        projection._backward_hooks,
        projection._backward_pre_hooks,
    )
    own = type(projection) is nn.Linear and "forward" not in vars(projection)
    return own and type(projection.weight) is nn.Parameter and not any(hooks)


def _renamed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """nn.MultiheadAttention's names for the projections turned into ours; every other entry as it is."""
    names: dict[str, tuple[str, ...]] = {f"{n}_proj_weight": (f"{n}_proj.weight",) for n in "qkv"}
    names["in_proj_weight"] = tuple(f"{n}_proj.weight" for n in "qkv")
    names["in_proj_bias"] = tuple(f"{n}_proj.bias" for n in "qkv")
    renamed = {}
    for name, tensor in state.items():
        own = names.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if own is None:
            renamed[name] = tensor
        else:
            renamed |= {prefix + part: piece for part, piece in zip(own, tensor.chunk(len(own)), strict=True)}
    return renamed
