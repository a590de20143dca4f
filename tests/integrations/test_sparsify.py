"""`sparsify` on trained models: quality beside controls, figures of the report, flags, interruption, reloading."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive

WORDS, N, BLOCK, WIDTH = 64, 512, 16, 64
BUDGET = "learned:0.11675;block=16;score_unit=4;k_min=1;local_blocks=1;sink_blocks=0;hidden_dim=16"
"""A counted density of 12.5 %: a causal row keeps its own block in any case."""


def pairs_and_questions(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """24 pairs of a key and a value in the first half of a sequence, and 48 questions for them in the second."""
    tokens = torch.randint(2 * WORDS, 3 * WORDS, (4, N), generator=generator)
    answers, row = torch.full_like(tokens, -100), torch.arange(4)[:, None]
    keys = torch.rand(4, WORDS, generator=generator).argsort(1)[:, :24]
    values = torch.randint(WORDS, 2 * WORDS, (4, 24), generator=generator)
    at = 2 * torch.rand(4, N // 4, generator=generator).argsort(1)[:, :24]
    tokens[row, at], tokens[row, at + 1] = keys, values
    place = N // 2 + torch.rand(4, N // 2, generator=generator).argsort(1)[:, :48]
    which = torch.randint(24, place.shape, generator=generator)
    tokens[row, place], answers[row, place] = keys.gather(1, which), values.gather(1, which)
    return tokens, answers


class Reader(nn.Module):
    """A user's model: a token asks, the token before a value is its key, the value is the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3 * WORDS, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        output, _ = self.attn(x, before, x, attn_mask=mask, is_causal=True, need_weights=False)
        return F.linear(output, self.embed.weight)


def answer_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-100)


@pytest.fixture(scope="module")
def reader() -> Reader:
    """Dense model that solves the task."""
    torch.manual_seed(0)
    model, generator = Reader(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        batch = pairs_and_questions(generator)
        optimizer.zero_grad()
        loss = answer_loss(model(batch[0]), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0.05:
            return model
    raise AssertionError("the dense model did not learn the task")


def fresh(seed: int, many: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [pairs_and_questions(generator) for _ in range(many)]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    model.eval()
    right = [(model(tokens).argmax(-1) == answers)[answers >= 0] for tokens, answers in fresh(7, 6)]
    return float(torch.cat(right).double().mean())


def sparsified(reader: Reader, steps: int) -> tuple[nn.Module, dap.SparsifyReport]:
    torch.manual_seed(1)
    model = copy.deepcopy(reader)
    settings = {"keep": 0.0, "lr": 1e-2, "measured_tokens": N, "progress": False}
    call = lambda model, batch: model(batch[0])  # noqa: E731
    return model, dap.sparsify(model, fresh(5, 12), steps, pattern=BUDGET, call=call, loss=answer_loss, **settings)


def dense_weights(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Attention weights (b, h, n, n) and values of a reader, written out in float64."""
    x = model.embed(tokens).double()
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    projections = (model.attn.q_proj, x), (model.attn.k_proj, before), (model.attn.v_proj, x)
    q, k, v = ((y @ p.weight.double().T).unflatten(-1, (2, -1)).transpose(1, 2) for p, y in projections)
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    return (q @ k.mT / (WIDTH // 2) ** 0.5).masked_fill(later, -torch.inf).softmax(-1), v


def chosen_blocks(model: nn.Module, tokens: Tensor) -> Tensor:
    """Blocks (b, h, n, t) that the learned layer attends to."""
    x = model.embed(tokens)
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return model.attn(x, before, x, is_causal=True, return_pattern=True)[1].selection.allowed()


@torch.no_grad()
def test_a_trained_model_is_sparsified_above_its_controls(reader):
    dense = accuracy(reader)
    model, report = sparsified(reader, 40)
    frozen, before = sparsified(reader, 0)
    (row,), (losses,) = report.layers, report.losses
    assert report.steps == 40 and report.held_out and not report.dense_layers and not report.restored
    assert row.density == pytest.approx(0.125, abs=0.003)

    # The report against attention that is written out.
    kept: dict[str, list[Tensor]] = {name: [] for name in ("learned", "untrained", "oracle", "random")}
    random_right = []
    own = torch.arange(N) // BLOCK
    column = torch.arange(N // BLOCK)
    generator = torch.Generator().manual_seed(3)
    for tokens, answers in fresh(5, 2):
        weights, values = dense_weights(model, tokens)
        mass = weights.unflatten(-1, (-1, BLOCK)).sum(-1)
        allowed = {"learned": chosen_blocks(model, tokens), "untrained": chosen_blocks(frozen, tokens)}
        counts = allowed["learned"].sum(-1) - 1
        assert torch.equal(counts, allowed["untrained"].sum(-1) - 1), "controls keep as many blocks"
        earlier = (column < own[:, None]).expand_as(mass)
        mine = column == own[:, None]

        def best(scores: Tensor, counts: Tensor = counts, earlier: Tensor = earlier, mine: Tensor = mine) -> Tensor:
            rank = scores.masked_fill(~earlier, -1).argsort(-1, descending=True).argsort(-1)
            return ((rank < counts[..., None]) & earlier) | mine

        allowed["oracle"] = best(mass)
        for name, blocks in allowed.items():
            kept[name].append((mass * blocks).sum(-1))
        share = counts[..., None] / earlier.sum(-1, keepdim=True).clamp(min=1)
        kept["random"].append((mass * torch.where(earlier, share, mine.double())).sum(-1))
        cut = weights * best(torch.rand(mass.shape, generator=generator)).repeat_interleave(BLOCK, -1)
        output = (cut / cut.sum(-1, keepdim=True) @ values).transpose(1, 2).flatten(2)
        logits = output @ model.attn.out_proj.weight.double().T @ model.embed.weight.double().T
        random_right.append((logits.argmax(-1) == answers)[answers >= 0])
    for name, found in kept.items():
        assert getattr(row, name) == pytest.approx(float(torch.cat(found).mean()), abs=1e-5), name
    assert before.layers[0].learned == pytest.approx(row.untrained, abs=1e-9)
    assert row.random < row.untrained < row.learned < row.oracle

    right = {"learned": accuracy(model), "frozen": accuracy(frozen)}
    by_chance = float(torch.cat(random_right).double().mean())
    assert dense > 0.9 and losses.dense < 0.3
    assert right["learned"] >= right["frozen"] and right["learned"] > by_chance + 0.3, (right, by_chance)
    assert losses.oracle < losses.learned < losses.untrained < losses.random


class Encoder(nn.Module):
    """Attention on its input, as a user may call it."""

    def __init__(self, attend: nn.Module, heads: int = 4, groups: int = 4) -> None:
        super().__init__()
        self.heads, self.groups, self.attend = heads, groups, attend

    def forward(self, x: Tensor, is_causal: bool, padding: Tensor | None = None) -> Tensor:
        q, k, v = x.split([self.heads, self.groups, self.groups], 2)
        return self.attend(q, k, v, is_causal, key_padding_mask=padding)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("granularity", ["block", "token"])
@pytest.mark.parametrize(("padded", "select"), [(False, "head"), (True, "head"), (True, "group")])
def test_captured_mass_equals_dense_weights(is_causal, granularity, padded, select):
    torch.manual_seed(0)
    n, size = 200, 16
    config = AdaptiveConfig(base_sparsity=0.7, score_unit=8, granularity=granularity, hidden_dim=8, select=select)
    layer = BlockSparseAdaptive([1], [1], 4, 8, config, block_size=size, num_kv_heads=2).double()
    model = Encoder(layer, 4, 2)
    padding = torch.arange(n) >= torch.tensor([[n], [150]]) if padded else None
    x = 2 * torch.randn(2, n, 8, 8, dtype=torch.float64)
    real = torch.ones(2, n, dtype=torch.bool) if padding is None else ~padding
    settings = {"keep": 0.0, "measured_tokens": 2 * n, "progress": False, "densities": (0.6,)}
    loss = lambda output, batch: output[real].square().mean()  # noqa: E731
    report = dap.sparsify(model, [(x, is_causal, padding)], 3, loss=loss, **settings)
    assert not report.held_out and [row.kept for row in report.layers] == [0.3, 0.6]

    q, k, v = (y.transpose(1, 2) for y in x.split([4, 2, 2], 2))
    seen = torch.ones(n, n, dtype=torch.bool).tril() if is_causal else torch.ones(n, n, dtype=torch.bool)
    seen = seen.expand(2, 1, n, n) if padding is None else seen & ~padding[:, None, None]
    logits = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    if padding is not None:
        weights = weights * ~padding[:, None, :, None]
    mass = F.pad(weights, (0, 208 - n)).unflatten(-1, (13, size)).sum(-1)
    _, pattern = layer.eval()(*(y.transpose(1, 2) for y in (q, k, v)), is_causal, True, key_padding_mask=padding)
    allowed = pattern.selection.allowed()
    rows = mass if pattern.selection.per_token else F.pad(mass, (0, 0, 0, 208 - n)).unflatten(2, (13, size)).sum(3)
    rows = rows.unflatten(1, (-1, pattern.selection.group)).sum(2)
    row = report.layers[0]
    left = row.untrained if report.restored else row.learned
    assert left == pytest.approx(float((rows * allowed).sum() / rows.sum()), abs=1e-9)
    assert row.density == pytest.approx(float(pattern.density), abs=1e-12)
    assert row.random < row.learned + 0.05 and max(row.learned, row.untrained, row.random) <= row.oracle + 1e-12

    # The oracle: forced blocks, and as many of the others by their mass.
    own, column = torch.arange(13), torch.arange(13)
    forced = ((own[:, None] - column).abs() < 2) | (column < 1)
    open_to_choice = ~forced & (column < own[:, None]) if is_causal else ~forced
    forced = forced & (column <= own[:, None]) if is_causal else forced
    if pattern.selection.per_token:
        forced, open_to_choice = (y[torch.arange(n) // size] for y in (forced, open_to_choice))
    rank = rows.masked_fill(~open_to_choice, -1).argsort(-1, descending=True).argsort(-1)
    best = forced | (open_to_choice & (rank < pattern.counts[..., None]))
    captured = float((rows * best).sum() / rows.sum())
    best = best.repeat_interleave(pattern.selection.group, 1)
    assert row.oracle == pytest.approx(captured, abs=1e-9)
    if not pattern.selection.per_token:
        best = best.repeat_interleave(size, 2)[:, :, :n]
    cut = weights * best.repeat_interleave(size, -1)[..., :n]
    output = (cut / cut.sum(-1, keepdim=True).clamp(min=1e-300)) @ v.repeat_interleave(2, 1)
    assert report.losses[0].oracle == pytest.approx(float(loss(output.transpose(1, 2), None)), rel=1e-9)


def encoder(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), layers)


def inputs(many: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 128, 32, generator=generator) for _ in range(many)]


QUICK = {"pattern": "learned:0.25;block=16;hidden_dim=8", "progress": False}


def test_weights_flags_and_modes_stay():
    model = encoder()
    model.layers[0].linear1.weight.requires_grad_(False)
    model.layers[0].self_attn.out_proj.weight.requires_grad_(False)
    model.layers[1].eval()
    dap.replace_attention(model, QUICK["pattern"])
    scorer = model.layers[0].self_attn.core.scorer
    scorer.summary.requires_grad_(False)
    before = copy.deepcopy(model)
    dap.sparsify(model, inputs(), 5, keep=0.0, progress=False)
    assert not torch.equal(scorer.match_query, before.layers[0].self_attn.core.scorer.match_query)
    for (name, module), other in zip(model.named_modules(), before.modules(), strict=True):
        assert module.training == other.training and "forward" not in vars(module), name
    for (name, parameter), other in zip(model.named_parameters(), before.parameters(), strict=True):
        assert parameter.requires_grad == other.requires_grad and parameter.grad is None, name
        assert "scorer" in name or torch.equal(parameter, other), name


def test_ctrl_c_ends_distillation_and_the_report_follows():
    def batches():
        yield from inputs(4)
        raise KeyboardInterrupt

    model = encoder()
    report = dap.sparsify(model, batches(), 10, keep=0.0, **QUICK)
    assert report.interrupted and report.steps == 2 and len(report.layers) == 2
    assert "interrupted" in str(report) and model(inputs(1)[0]).isfinite().all()


def test_ctrl_c_within_the_measurement_leaves_a_valid_model():
    calls = []

    def call(model, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return model(batch)

    model = encoder().train()
    with pytest.raises(KeyboardInterrupt):
        dap.sparsify(model, inputs(), 2, call=call, loss=lambda y, x: y.mean(), **QUICK)
    assert model.training and all("forward" not in vars(module) for module in model.modules())
    assert model.layers[0].self_attn.core.config.kept == 0.25
    assert model(inputs(1)[0]).isfinite().all()


def test_layers_that_do_not_pay_stay_dense_and_reload():
    model, x = encoder().eval(), inputs(1)[0]
    expected = model(x)
    report = dap.sparsify(model, inputs(), 2, keep=1.0, loss=lambda y, x: (y - x).square().mean(), **QUICK)
    assert report.dense_layers == ["layers.0.self_attn", "layers.1.self_attn"]
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert report.loss == pytest.approx(report.losses[0].dense, abs=1e-6)
    assert report.patterns["layers.0.self_attn"] == "learned:1;block=16;hidden_dim=8"

    half = encoder().eval()
    report = dap.sparsify(half, inputs(), 2, keep=0.0, **QUICK)
    dense = {"layers.1.self_attn": "learned:1;block=16;hidden_dim=8"}
    dap.replace_attention(half, dense)
    again = encoder().eval()
    dap.replace_attention(again, json.loads(report.to_json())["patterns"] | dense)
    again.load_state_dict(half.state_dict())
    assert torch.equal(again(x), half(x)) and not torch.allclose(half(x), expected, atol=1e-3)


def test_a_scorer_below_its_initialisation_is_put_back(reader):
    torch.manual_seed(1)
    model = copy.deepcopy(reader)
    dap.replace_attention(model, BUDGET)
    before = copy.deepcopy(model.attn.core.scorer.state_dict())
    call = lambda model, batch: model(batch[0])  # noqa: E731
    report = dap.sparsify(model, fresh(5, 4), 3, call=call, keep=0.0, lr=30.0, progress=False)
    assert report.layers[0].learned < report.layers[0].untrained and report.restored == ["attn"]
    for name, value in model.attn.core.scorer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_report_is_text_and_json(tmp_path, capsys):
    model = encoder(1)
    lines: list[str] = []
    settings = {**QUICK, "progress": lines.append}
    report = dap.sparsify(model, inputs(), 4, loss=lambda y, x: y.square().mean(), densities=[0.5], **settings)
    text = str(report)
    assert all(word in text for word in ("learned", "untrained", "oracle", "random", "density", "layers.0.self_attn"))
    assert len(report.layers) == 2 and len(report.losses) == 2 and max(map(len, text.split("\n"))) < 120
    stored = json.loads(report.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == stored and stored["layers"][0]["kept"] == 0.25
    assert "step 4/4" in lines[-2] and "measuring" in lines[-1] and not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tuple", "mapping", "ends", "few"])
def test_batches_of_every_kind(kind):
    settings = {**QUICK, "keep": 0.0}
    if kind == "tuple":
        report = dap.sparsify(encoder(1), [(x, None) for x in inputs()], 5, **settings)
    elif kind == "mapping":
        report = dap.sparsify(encoder(1), [{"src": x} for x in inputs()], 5, **settings)
    elif kind == "few":
        report = dap.sparsify(encoder(1), inputs(1), 5, **settings)
    else:
        report = dap.sparsify(encoder(1), (x for x in inputs(5)), 5, **settings)
    assert report.steps == (3 if kind == "ends" else 5)
    assert report.held_out == (kind != "few") and not report.interrupted


@pytest.mark.filterwarnings("ignore:replace_attention changed nothing")
def test_refusals():
    with pytest.raises(ValueError, match="adaptive_ratio must be None"):
        dap.sparsify(encoder(1), inputs(), 1, pattern="learned:0.5;block=16;adaptive_ratio=0.9")
    with pytest.raises(ValueError, match=r"pattern must be learned attention, such as \"learned:0\.06"):
        dap.sparsify(encoder(1), inputs(), 1, pattern="window:16")
    with pytest.raises(ValueError, match="model must have attention that learned attention can replace, got Linear"):
        dap.sparsify(nn.Linear(4, 4), inputs(), 1)
    with pytest.raises(TypeError, match="batches must be an iterable of the model's inputs, got Tensor"):
        dap.sparsify(encoder(1), inputs()[0], 1, **QUICK)
    with pytest.raises(ValueError, match="densities must lie in"):
        dap.sparsify(encoder(1), inputs(), 1, densities=[0.0], **QUICK)
    model = encoder(1)
    dap.replace_attention(model, QUICK["pattern"])
    with pytest.raises(ValueError, match="pattern must be None for a model with learned layers"):
        dap.sparsify(model, inputs(), 1, **QUICK)
