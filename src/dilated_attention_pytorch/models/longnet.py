"""LongNet: stacks of layers, and language models on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import must, must_be
from ..nn import KVCache
from ..ops.derivatives import once_differentiable
from .config import LongNetConfig
from .layers import DilatedTransformerDecoderLayer, DilatedTransformerEncoderLayer, evaluating, world_of

LOGITS_AT_A_TIME = 1 << 24
"""Logits that the loss holds at once."""


def _config(config: LongNetConfig | str | None, settings: dict[str, Any]) -> LongNetConfig:
    if isinstance(config, str):
        return LongNetConfig.named(config, **settings)
    if config is None:
        return LongNetConfig(**settings)
    if not isinstance(config, LongNetConfig):
        raise must_be("config must be a LongNetConfig or the name of a size", type(config).__name__)
    return replace(config, **settings)


class Stack(nn.Module):
    """Layers one after another, and a LayerNorm at the end where each begins with one."""

    def __init__(
        self,
        config: LongNetConfig,
        of: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        cross = of == "decoder" and config.form == "encoder-decoder"
        made = DilatedTransformerDecoderLayer if cross else DilatedTransformerEncoderLayer
        count = config.num_encoder_layers if of == "encoder" else config.num_decoder_layers
        self.checkpointing = config.gradient_checkpointing
        options: dict[str, Any] = {}
        if cross:
            options = {"memory_pattern": config.memory_pattern, "memory_norm": config.memory_norm}
        self.layers = nn.ModuleList(
            made(
                config.d_model,
                config.nhead,
                config.pattern(layer),
                None,
                config.dim_feedforward,
                config.dropout,
                config.activation,
                config.layer_norm_eps,
                config.gamma(of),
                norm_first=config.norm_first,
                sub_norm=config.sub_norm,
                bias=config.bias,
                num_kv_heads=config.num_kv_heads,
                position=config.position,
                attention_dropout=config.attention_dropout,
                sink=config.sink,
                zero_padding=config.zero_padding and of == "encoder",
                shifted_segments=config.shifted_segments,
                detach_mixing=config.detach_mixing,
                adaptive=config.adaptive,  # pyrefly: ignore[bad-argument-type]
                adaptive_block_size=config.adaptive_block_size,
                device=device,
                dtype=dtype,
                **options,
            )
            for layer in range(count)
        )
        factory_options: dict[str, Any] = {"device": device, "dtype": dtype}
        final = partial(nn.LayerNorm, config.d_model, config.layer_norm_eps, bias=config.bias, **factory_options)
        self.norm = final() if config.has_final_norm else None

    def forward(self, x: Tensor, *given: Any, caches: Sequence[KVCache] | None = None, **settings: Any) -> Tensor:
        """Pass (B, N, E) through every layer; what else is given goes to each."""
        for index, layer in enumerate(self.layers):
            if caches is not None:
                x = layer(x, *given, cache=caches[index], **settings)
            elif self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, *given, use_reentrant=False, **settings)
            else:
                x = layer(x, *given, **settings)
        return x if self.norm is None else self.norm(x)


class LongNet(nn.Module):
    """Transformer stacks over embeddings (B, N, E): encoder, decoder, or both.

    Args:
        config: a `LongNetConfig`, the name of a size, or None.
        device: device of the parameters.
        dtype: dtype of the parameters.
        settings: fields of `LongNetConfig` to change.

    >>> model = LongNet("tiny", num_decoder_layers=1, segment_lengths=[64, 256], dilation_rates=[1, 2])
    >>> model(torch.randn(1, 500, 256)).shape
    torch.Size([1, 500, 256])
    """

    def __init__(
        self,
        config: LongNetConfig | str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.config = _config(config, settings)
        self.encoder = Stack(self.config, "encoder", device, dtype) if self.config.num_encoder_layers else None
        self.decoder = Stack(self.config, "decoder", device, dtype) if self.config.num_decoder_layers else None

    def forward(
        self,
        x: Tensor,
        tgt: Tensor | None = None,
        *,
        is_causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Pass embeddings through.

        Args:
            x: (B, N, E), input of the encoder, or of the decoder if there is no encoder.
            tgt: (B, M, E), input of the decoder of an encoder-decoder. Without it both stacks read `x`.
            is_causal: whether no token attends to a later token in the stack that reads `x`. By default a decoder is
                causal and an encoder is not. A decoder that reads `tgt` is always causal. If both stacks read `x`,
                self-attention and cross-attention of both are causal by default.
            key_padding_mask: bool (B, N), True where a token of `x` is ignored; `tgt_key_padding_mask` of `tgt`.
            cu_seqlens: bounds of packed sequences, for a single stack.

        Returns:
            Same shape as `tgt` with both stacks, otherwise as `x`.
        """
        alone = tgt is None and self.config.form == "encoder-decoder"
        if not alone:
            self.check_pair("tgt", tgt)
        stack = self.encoder or self.decoder
        assert stack is not None
        causal = (self.encoder is None or alone) if is_causal is None else is_causal
        hidden = stack(x, src_key_padding_mask=key_padding_mask, is_causal=causal, cu_seqlens=cu_seqlens)
        if tgt is None and not alone:
            return hidden
        if cu_seqlens is not None:
            raise must("cu_seqlens must come with one stack", "an encoder-decoder", "Use key_padding_mask.")
        if tgt is None:
            if tgt_key_padding_mask is not None:
                raise must("tgt_key_padding_mask must come with tgt", "none", "key_padding_mask holds for both stacks.")
            masks = {"tgt_key_padding_mask": key_padding_mask, "memory_key_padding_mask": key_padding_mask}
            assert self.decoder is not None
            return self.decoder(x, hidden, tgt_is_causal=causal, memory_is_causal=causal, **masks)
        return self.decode(tgt, hidden, key_padding_mask=tgt_key_padding_mask, memory_key_padding_mask=key_padding_mask)

    def check_pair(self, name: str, given: Tensor | None) -> None:
        """Raise for two sequences with one stack, or one sequence with two stacks."""
        if given is not None and not isinstance(given, Tensor):
            raise must_be(f"{name} must be a Tensor or None", type(given).__name__, "Pass is_causal= by its name.")
        if (given is None) == (self.config.form == "encoder-decoder"):
            came = f"{'none' if given is None else 'one'} and form {self.config.form!r}"
            raise must(f"{name} must be given to an encoder-decoder, and to it alone", came)

    def decode(
        self,
        tgt: Tensor,
        memory: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """The decoder alone, causal: (B, M, E), with what the encoder made where there is one."""
        decoder = self._decoder()
        if memory is None:
            return decoder(tgt, src_key_padding_mask=key_padding_mask, is_causal=True, caches=caches)
        if len(memory) != len(tgt):
            raise must("source and target must have the same batch size", f"{len(memory)} and {len(tgt)}")
        return decoder(
            tgt,
            memory,
            tgt_key_padding_mask=key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=True,
            caches=caches,
        )

    def caches(self, length: int | None = None) -> list[KVCache]:
        """An empty cache for each decoder layer; `length` as for `KVCache`."""
        return [layer.self_attn.cache(length) for layer in self._decoder().layers]  # pyrefly: ignore

    def _decoder(self) -> Stack:
        if self.decoder is None:
            raise must("decoding must have a decoder", "an encoder alone", "Set num_decoder_layers.")
        return self.decoder


class LongNetLM(nn.Module):
    """A language model on `LongNet`: token ids (B, N) in, logits (B, N, num_tokens) out.

    Arguments are those of `LongNet`. A decoder predicts the next token, an encoder the token itself (for masked
    training), an encoder-decoder the next token of `tgt`, or of the one sequence that both stacks read.

    >>> model = LongNetLM("tiny", num_decoder_layers=1, segment_lengths=[64, 256], dilation_rates=[1, 2])
    >>> tokens = torch.randint(256, (1, 300))
    >>> model(tokens).shape, model.loss(tokens).shape
    (torch.Size([1, 300, 256]), torch.Size([]))
    """

    def __init__(
        self,
        config: LongNetConfig | str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.config = config = _config(config, settings)
        self.token_embedding = nn.Embedding(config.num_tokens, config.d_model, device=device, dtype=dtype)
        nn.init.normal_(self.token_embedding.weight, std=config.d_model**-0.5)
        self.source_embedding = None
        if config.num_source_tokens is not None:
            self.source_embedding = nn.Embedding(config.num_source_tokens, config.d_model, device=device, dtype=dtype)
            nn.init.normal_(self.source_embedding.weight, std=config.d_model**-0.5)
        self.long_net = LongNet(config, device=device, dtype=dtype)
        self.out = nn.Linear(config.d_model, config.num_tokens, config.bias, device=device, dtype=dtype)
        nn.init.normal_(self.out.weight, std=config.d_model**-0.5)
        if config.tie_embeddings:
            self.out.weight, self.out.bias = self.token_embedding.weight, None  # pyrefly: ignore[bad-assignment]

    @property
    def num_parameters(self) -> int:
        """Entries of all parameters, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def hidden(self, tokens: Tensor, tgt: Tensor | None = None, **settings: Any) -> Tensor:
        """Hidden states of `LongNet` for token ids, (B, N, E); settings are those of its `forward`."""
        if tgt is None and self.source_embedding is not None:
            raise must("tgt must be given to a model with num_source_tokens", "none")
        if self.config.sinusoids and (settings.get("cu_seqlens") is not None or world_of(self) > 1):
            raise must("sinusoids must come with whole sequences on one device", "packed or spread ones")
        if tgt is not None:
            self.long_net.check_pair("tgt", tgt)
        read = self._embed(tokens, self.source_embedding)
        return self.long_net(read, None if tgt is None else self._embed(tgt), **settings)

    def forward(
        self, tokens: Tensor, tgt: Tensor | None = None, *, targets: Tensor | None = None, **settings: Any
    ) -> Tensor:
        """Logits of every token, or with `targets` the loss; settings are those of `LongNet.forward` or of `loss`.

        DDP and FSDP2 wrap only `forward`, so train a wrapped model with `model(tokens, targets=...)`.
        """
        if targets is not None:
            return self.loss(tokens, targets, tgt, **settings)
        return self.out(self.hidden(tokens, tgt, **settings))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        tgt: Tensor | None = None,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
        **settings: Any,
    ) -> Tensor:
        """Cross-entropy in nats, with the logits of a few thousand tokens in memory at a time.

        Args:
            tokens: ids (B, N).
            targets: ids (B, N) to predict at each token, `ignore_index` where none; by default the token after it, and
                of an encoder-decoder the one after each of `tgt`. An encoder needs them.
            tgt: ids (B, M) for an encoder-decoder.
            reduction: "mean" over the targets, of this rank where there are several, "sum", or "none", (B, N).
            ignore_index: target that is ignored.
        """
        if targets is None:
            if self.config.form == "encoder":
                raise must("targets must be given to an encoder", "none", "Mask some tokens and pass the original ids.")
            if (world := world_of(self)) > 1:
                raise must("targets must be given to a model over several ranks", f"none, {world} ranks",
                           "The next rank holds the last: distributed.next_token_labels.")  # fmt: skip
            read = tokens if tgt is None else tgt
            targets = F.pad(read[:, 1:].long(), (0, 1), value=ignore_index)
        hidden = self.hidden(tokens, tgt, **settings)
        if targets.shape != hidden.shape[:2]:
            raise must(f"targets must have shape {tuple(hidden.shape[:2])}", tuple(targets.shape))
        if reduction not in ("mean", "sum", "none"):
            raise must('reduction must be "mean", "sum" or "none"', repr(reduction))
        rows = max(1, LOGITS_AT_A_TIME // self.config.num_tokens)
        flat = targets.flatten().long()
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            # A transform maps and differentiates torch's operations, on all logits at once.
            logits = F.linear(*self._unembedded(hidden)).to(torch.promote_types(hidden.dtype, torch.float32))
            each = F.cross_entropy(logits, flat, ignore_index=ignore_index, reduction="none")
        else:
            each = _ChunkedLoss.apply(*self._unembedded(hidden), flat, ignore_index, rows)
        if reduction == "none":
            return each.view_as(targets)
        return each.sum() if reduction == "sum" else each.sum() / (flat != ignore_index).sum()

    def _unembedded(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows, weight and bias of the last projection, in the type that autocast would take."""
        given = (hidden.flatten(0, 1), self.out.weight, self.out.bias)
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return tuple(None if tensor is None else tensor.to(dtype) for tensor in given)  # pyrefly: ignore
        return given

    def _embed(self, tokens: Tensor, embedding: nn.Embedding | None = None, first: int = 0) -> Tensor:
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise must("tokens must be integers of shape (batch, n)", f"{tokens.dtype} {tuple(tokens.shape)}")
        embedding, tokens = embedding or self.token_embedding, tokens.long()
        try:
            x = embedding(tokens)
        except IndexError:
            came = f"{int(tokens.min())} to {int(tokens.max())}"
            raise IndexError(f"tokens must be ids from 0 to {embedding.num_embeddings - 1}, got {came}") from None
        if self.config.scale_embedding:
            x = x * self.config.d_model**0.5
        return x + fairseq_sinusoids(first, x) if self.config.sinusoids else x

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        src: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a prompt, token by token, with a KV cache.

        Args:
            prompt: ids (B, N), at least one each.
            max_new_tokens: number of tokens to generate.
            src: ids (B, M) that the encoder of an encoder-decoder reads.
            temperature: 0 selects the most likely token; otherwise logits are divided by it and a token is sampled.
            top_k: sample from this many most likely tokens.
            top_p: sample from the most likely tokens that together reach this probability.
            stop: id after which a sample is filled with `stop`; the call ends when all samples have.
            generator: random generator for sampling.

        Returns:
            The new ids (B, at most max_new_tokens).
        """
        draw = Sampler(temperature, top_k, top_p, generator)
        if max_new_tokens < 0 or prompt.dim() != 2 or not prompt.numel():
            came = f"{tuple(prompt.shape)}, {max_new_tokens}"
            raise must("generate must have a prompt (batch, n) that is not empty, and max_new_tokens >= 0", came)
        if stop is not None and not 0 <= stop < self.config.num_tokens:
            raise must(f"stop must be a token, 0 .. {self.config.num_tokens - 1}, or None", stop)
        self.long_net.check_pair("src", src)
        with evaluating(self):
            read = None if src is None else self._embed(src, self.source_embedding)
            memory = None if read is None else self.long_net.encoder(read)  # pyrefly: ignore
            caches = self.long_net.caches(prompt.shape[1] + max_new_tokens)
            # A small type of the prompt may not hold the ids that follow.
            dtype = prompt.dtype if torch.iinfo(prompt.dtype).max >= self.config.num_tokens - 1 else torch.int64
            ids, generated = prompt, []
            done = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
            for step in range(max_new_tokens):
                first = prompt.shape[1] + step - 1 if step else 0
                hidden = self.long_net.decode(self._embed(ids, first=first), memory, caches=caches)
                ids = draw(self.out(hidden[:, -1]))[:, None]
                if stop is not None:
                    ids = ids.masked_fill(done[:, None], stop)
                    done |= ids[:, 0] == stop
                generated.append(ids)
                if stop is not None and bool(done.all()):
                    break
            return (torch.cat(generated, 1) if generated else prompt[:, :0]).to(dtype)


def fairseq_sinusoids(first: int, x: Tensor) -> Tensor:
    """fairseq's table (N, E) of sines, then cosines, for embeddings (B, N, E) whose first token has number `first`.

    Token 0 has position 2: positions up to 1 stand for padding there.
    """
    n, width = x.shape[1:]
    half = width // 2
    place = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
    rates = torch.exp(torch.arange(half, **place) * -(math.log(10000) / max(1, half - 1)))
    angles = torch.arange(first + 2, first + 2 + n, **place)[:, None] * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, width % 2)).to(x.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Cross-entropy (N) of rows (N, E) under a projection, a few rows of logits at a time in both passes.

    Activation checkpointing would do the same in one line, and fragment the heap until it holds most of the logits.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, rows: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.ignore_index, ctx.rows = ignore_index, rows
        work = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(len(hidden), dtype=work, device=hidden.device)
        for own, chunk, target in zip(losses.split(rows), hidden.split(rows), targets.split(rows), strict=True):
            logits = F.linear(chunk, weight, bias).to(work)
            own.copy_(F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none"))
        return losses

    @staticmethod
    @once_differentiable("LongNetLM.loss")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        hidden, weight, bias, targets = ctx.saved_tensors
        work = grads[0].dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=work)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=work)
        chunks = (tensor.split(ctx.rows) for tensor in (grad_hidden, hidden, targets, grads[0]))
        for own, chunk, target, grad in zip(*chunks, strict=True):
            counts = target != ctx.ignore_index
            errors = F.linear(chunk, weight, bias).to(work).softmax(-1)
            errors.scatter_add_(1, target.where(counts, 0)[:, None], -torch.ones_like(grad)[:, None])
            errors *= (grad * counts)[:, None]
            narrow = errors.to(chunk.dtype)
            torch.mm(narrow, weight, out=own)
            grad_weight += narrow.T @ chunk
            if grad_bias is not None:
                grad_bias += errors.sum(0)
        bias_grad = grad_bias if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), bias_grad, None, None, None


class Sampler:
    """Chooses a token from logits (B, V); see `LongNetLM.generate`."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
    ) -> None:
        if not 0.0 <= temperature < float("inf"):
            raise must("temperature must be >= 0 and finite", temperature)
        if top_k is not None and top_k < 1:
            raise must("top_k must be >= 1", top_k)
        if top_p is not None and not 0.0 < top_p <= 1.0:
            raise must("top_p must lie in (0, 1]", top_p)
        if not temperature and (top_k is not None or top_p is not None):
            raise must("top_k and top_p must come with a temperature above 0", temperature)
        self.temperature, self.top_k, self.top_p, self.generator = temperature, top_k, top_p, generator

    def __call__(self, logits: Tensor) -> Tensor:
        if not self.temperature:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=self.generator)[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Distribution that tokens are sampled from."""
        logits = logits.float()
        # The likeliest becomes 0, which no temperature takes out of range; below 1e-30 none is left but it.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = logits.softmax(-1)
        if self.top_p is not None:
            ordered, order = chances.sort(-1, descending=True)
            # A token stays while those before it have not reached top_p; so the first always does.
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)
            chances = torch.zeros_like(chances).scatter(-1, order, ordered)
            chances = chances / chances.sum(-1, keepdim=True)
        return chances
