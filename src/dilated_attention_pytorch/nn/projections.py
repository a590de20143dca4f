"""Projections before and after attention, and what they share with `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import must, must_be

Own = TypeVar("Own", bound="Projections")


OWN_NAMES: dict[str, tuple[str, ...]] = {
    "in_proj_weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "in_proj_bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    **{f"{n}_proj_weight": (f"{n}_proj.weight",) for n in "qkv"},
}
"""Parameters of `torch.nn.MultiheadAttention` -> those of `Projections` that share them."""


class _NoTensor:
    """Placeholder weight for torch's fused paths; it overrides torch functions, which disables these paths."""

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
        factory_options: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_width = kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **factory_options)
        self.k_proj = nn.Linear(self.kdim, kv_width, bias, **factory_options)
        self.v_proj = nn.Linear(self.vdim, kv_width, bias, **factory_options)
        self.norm = None if norm_eps is None else nn.LayerNorm(embed_dim, norm_eps, bias=bias, **factory_options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **factory_options)
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
            projected = joined.split([projection.out_features for projection in three], -1)
        else:
            projected = [projection(tensor) for projection, tensor in zip(three, (query, key, value), strict=True)]
        for projection, tensor in zip(("q_proj", "k_proj", "v_proj"), projected, strict=True):
            if tensor.shape[-1] % self.head_dim:
                advice = "A tensor-parallel plan must divide num_heads and num_kv_heads evenly."
                raise must(f"{projection} must give whole heads of {self.head_dim}", tensor.shape[-1], advice)
        q, k, v = (tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for tensor in projected)
        if q.shape[1] != self.num_heads or k.shape[1] != self.num_kv_heads:
            self._check_shard(q.shape[1], k.shape[1], q.shape[2])
        return q, k, v

    def _check_shard(self, heads: int, kv_heads: int, n: int) -> None:
        """Refuse local heads of a tensor-parallel plan that the whole module would compute differently."""
        shard = f"{heads} query heads and {kv_heads} key heads"
        whole = f"{self.num_heads} and {self.num_kv_heads}"
        if self.num_heads % heads or heads * self.num_kv_heads != kv_heads * self.num_heads:
            raise must(f"a tensor-parallel plan must divide num_heads and num_kv_heads, {whole}, alike", shard)
        if self.norm is not None:
            raise must(
                f"sub-LayerNorm must normalise all num_heads={self.num_heads} heads at once",
                f"{heads} local heads",
                "Build the module with layer_norm=False, or leave its attention out of the tensor-parallel plan.",
            )

    def finish(self, projected: Tensor) -> Tensor:
        """Normalise the output of attention (B, H, N, D) if configured, and project it to (B, N, E)."""
        output = projected.transpose(1, 2).flatten(2)
        return self.out_proj(output if self.norm is None else self.norm(output))

    @classmethod
    def from_torch(cls: type[Own], mha: nn.MultiheadAttention, *pattern: Any, **options: Any) -> Own:
        """Module with the weights of a `torch.nn.MultiheadAttention`; frozen parameters stay frozen.

        `pattern` holds the arguments that `cls` takes after the heads.

        >>> from dilated_attention_pytorch import MultiheadDilatedAttention
        >>> mha = nn.MultiheadAttention(64, 4, batch_first=True)
        >>> MultiheadDilatedAttention.from_torch(mha, [32, 64], [1, 2]).num_heads
        4
        """
        if not isinstance(mha, nn.MultiheadAttention):
            raise must_be("from_torch must be given a torch.nn.MultiheadAttention", type(mha).__name__)
        if (reason := why_not_replaced(mha)) is not None:
            raise must("from_torch must be given a plain torch.nn.MultiheadAttention", reason)
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
        if mha.bias_k is not None or mha.add_zero_attn:
            taken |= {"add_bias_kv": mha.bias_k is not None, "add_zero_attn": mha.add_zero_attn}
        own = cls(mha.embed_dim, mha.num_heads, *pattern, **{**taken, **options})
        # Only a LayerNorm and a sink that were requested here have no weights to load.
        own.load_state_dict({**own.state_dict(), **_renamed(mha.state_dict(), "")})
        for name, parameter in mha.named_parameters():
            for own_name in OWN_NAMES.get(name, (name,)):
                own.get_parameter(own_name).requires_grad_(parameter.requires_grad)
        return own.train(mha.training)

    def torch_state_dict(self) -> dict[str, Tensor]:
        """The weights as `torch.nn.MultiheadAttention` names them."""
        sink = self._parameters.get("sink")
        if self.norm is not None or sink is not None or self.num_kv_heads != self.num_heads:
            came = "a sink" if sink is not None else f"{self.num_kv_heads} key heads"
            came = "sub-LayerNorm" if self.norm is not None else came
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
        state |= {name: extra for name in ("bias_k", "bias_v") if (extra := self._parameters.get(name)) is not None}
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _load_from_state_dict(  # pyrefly: ignore[bad-override]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        state = _renamed(state_dict, prefix)
        state_dict.clear()
        state_dict.update(state)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of this module or of `torch.nn.MultiheadAttention`, which has no LayerNorm."""
        of_torch = not state_dict.keys().isdisjoint(OWN_NAMES)
        if strict and of_torch and self.norm is not None and "norm.weight" not in state_dict:
            name = type(self).__name__
            raise RuntimeError(
                f"{name} has a LayerNorm before its output projection, which nn.MultiheadAttention does not have; "
                f"build {name}(..., layer_norm=False), or use {name}.from_torch"
            )
        return super().load_state_dict(state_dict, strict, assign)


def why_not_replaced(mha: nn.MultiheadAttention) -> str | None:
    """Reason why a pattern cannot take the place of a module; None if it can."""
    if "forward" in vars(mha) or type(mha).forward is not nn.MultiheadAttention.forward:
        return f"{type(mha).__name__} has a forward of its own"
    return None


def _plain(projection: nn.Module) -> bool:
    """Whether a call only multiplies: the projection has no hooks, adapter or parametrisation."""
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
    renamed = {}
    for name, tensor in state.items():
        own = OWN_NAMES.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if own is None:
            renamed[name] = tensor
        else:
            renamed |= {prefix + part: piece for part, piece in zip(own, tensor.chunk(len(own)), strict=True)}
    return renamed
