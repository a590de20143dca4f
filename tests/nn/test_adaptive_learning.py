"""The scorer learns: its gradient is the written formula, and it finds what was hidden."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from oracle import error
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.nn import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    SparseAttention,
    scorer_parameters,
    task_parameters,
)
from dilated_attention_pytorch.nn.adaptive.controls import (
    LayerCall,
    captured_mass,
    copied_state,
    distill_layer,
    shares_of,
)
from dilated_attention_pytorch.selection.attention import selected_attention
from dilated_attention_pytorch.selection.backend import select
from dilated_attention_pytorch.selection.distill import FLOOR
from dilated_attention_pytorch.selection.types import DistillBatch

BOTH = pytest.mark.parametrize("is_causal", [False, True])
ROWS = pytest.mark.parametrize("granularity", ["block", "token"])
ROOT = Path(__file__).resolve().parents[2]


def loaded(place):
    spec = importlib.util.spec_from_file_location(Path(place).stem, ROOT / place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tasks = loaded("benchmarks/adaptive.py")


@BOTH
@pytest.mark.parametrize(
    "more", [{}, {"granularity": "block"}, {"granularity": "token"}, {"adaptive_ratio": 0.8}, {"num_layers": 3},
             {"dropout": 0.2}, {"share_across_heads": True}, {"hard_sparsity": False}, {"saliency_weighted": False},
             {"select": "all"},
             {"score_gradient": "straight_through"}, {"score_gradient": "prior"}],
)  # fmt: skip
def test_every_parameter_gets_a_gradient(is_causal, more):
    config = AdaptiveConfig(base_sparsity=0.6, local_blocks=1, sink_blocks=0, score_unit=4, **more)
    module = BlockSparseAdaptive([256], [1], 2, 16, config, block_size=16, backend="cpu")
    q, k, v = torch.randn(3, 2, 150, 2, 16).unbind()
    module(q, k, v, is_causal).square().sum().backward()
    found = {name: x.grad for name, x in module.named_parameters()}
    assert all(x.isfinite().all() for x in found.values())
    least = 1e-5 * max(x.abs().max() for x in found.values())
    # The last bias moves all scores of a row alike: it matters beside the own block alone.
    last = f"scorer.importance.bias_{config.num_layers - 1}"
    beside_own = {"adaptive_ratio", "hard_sparsity", "score_gradient"} & more.keys()
    assert [name for name, x in found.items() if x.abs().max() < least] == ([] if beside_own else [last])


def test_no_gradient_when_none_is_wanted():
    config = AdaptiveConfig(base_sparsity=0.6, score_gradient="none")
    module = BlockSparseAdaptive([256], [1], 2, 16, config, block_size=16)
    x = torch.randn(3, 2, 150, 2, 16).requires_grad_()
    module(*x.unbind()).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    assert x.grad.isfinite().all()


def test_the_scorer_does_not_bend_what_it_looks_at():
    """Queries, keys and values get the gradient of attention alone, whatever the weight of distillation."""
    grads = []
    for weight in (0.0, 100.0):
        config = AdaptiveConfig(base_sparsity=0.6, distill_weight=weight)
        torch.manual_seed(0)
        module = BlockSparseAdaptive([256], [1], 2, 16, config, block_size=16)
        x = torch.randn(3, 1, 150, 2, 16).requires_grad_()
        module(*x.unbind(), is_causal=True).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("saliency", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("select_by", ["head", "group"])
@BOTH
@pytest.mark.parametrize(
    ("granularity", "row_tokens", "with_own"),
    [("block", None, True), ("block", 4, False), ("block", 1, True), ("token", None, True), ("token", 1, False)],
)
def test_scorer_gradient_is_that_of_the_documented_loss(
    granularity, row_tokens, with_own, is_causal, select_by, padded, saliency
):
    n, size, t = 90, 16, 6
    config = AdaptiveConfig(base_sparsity=0.5, local_blocks=1, granularity=granularity, select=select_by)
    module = BlockSparseAdaptive([256], [1], 4, 8, config, block_size=size, num_kv_heads=2).double()
    lists, group = module.scorer.lists, module.scorer.group
    q = torch.randn(2, 4, n, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, n, 8, dtype=torch.float64).unbind()
    padding = torch.arange(n) >= torch.tensor([n, 50])[:, None] if padded else None
    scores = module.score_blocks(q, k, is_causal, padding)
    selection = select(scores, n)
    queries = row_tokens or (size if granularity == "block" else 1)
    rows = torch.arange(-(-n // queries))
    batch = DistillBatch(torch.cat([rows[1::2], rows[::3]]), len(rows[1::2]), scores.visible, 0.7, saliency, len(rows))
    batch.row_tokens, batch.with_own = row_tokens, with_own
    chosen = torch.randn(
        2, lists, len(batch.chosen_rows), selection.indices.shape[-1], dtype=torch.float64, requires_grad=True
    )
    dense = torch.randn(2, lists, len(batch.dense_rows), t, dtype=torch.float64, requires_grad=True)
    q.requires_grad_()
    output = selected_attention(
        q,
        k,
        v,
        selection,
        key_padding_mask=padding,
        enable_gqa=True,
        distill=batch,
        scores=lambda *_: (chosen, dense),
        backend="cpu",
    )
    grad_output = torch.randn_like(output)
    got = torch.autograd.grad(output, (chosen, dense), grad_output)

    token = torch.arange(n)
    allowed = selection.per_head().allowed()
    allowed = allowed[:, :, token if granularity == "token" else token // size][..., token // size]
    visible = torch.ones(n, n, dtype=torch.bool).tril() if is_causal else torch.ones(n, n, dtype=torch.bool)
    visible = visible.expand(2, 4, n, n) if padding is None else visible & ~padding[:, None, None]
    logits = q.detach() @ k.repeat_interleave(2, 1).mT * 8**-0.5
    weight = grad_output.norm(dim=-1) if saliency else torch.ones(2, 4, n, dtype=torch.float64)
    real = torch.ones(2, 1, n, dtype=torch.float64) if padding is None else (~padding[:, None]).double()
    mean = (weight * real).sum(-1) / real.sum(-1)
    weight = (weight + FLOOR * mean[..., None] if saliency else weight) * real

    def by_list(x):
        """Summed over the heads of a list."""
        return x.unflatten(1, (lists, group)).sum(2)

    def mass(seen):
        share = (
            F.pad(logits.masked_fill(~seen, -torch.inf).softmax(-1), (0, t * size - n)).unflatten(-1, (t, size)).sum(-1)
        )
        share = share * weight[..., None]
        return F.pad(share, (0, 0, 0, len(rows) * queries - n)).unflatten(2, (-1, queries)).sum(3)

    own = rows * queries // size
    others = torch.arange(t) < own[:, None] if is_causal else torch.arange(t) != own[:, None]
    others = others & scores.visible[:, :, None]
    loss = told = 0.0
    lists_of = selection.indices if granularity == "token" else selection.indices[:, :, own]
    for some, found, blocks, valid, seen in (
        (batch.chosen_rows, chosen, lists_of[:, :, batch.chosen_rows].long(), None, visible & allowed),
        (batch.dense_rows, dense, None, others[:, :, batch.dense_rows], visible),
    ):
        of_rows = by_list(mass(seen)[:, :, some])
        if blocks is not None:
            valid = blocks < t
            of_blocks = of_rows.gather(-1, blocks.clamp(max=t - 1))
        else:
            of_blocks = of_rows
        mine = of_rows.gather(-1, own[some].expand(2, lists, -1)[..., None]) * with_own
        target = torch.cat([of_blocks * valid, mine], -1)
        total = target.sum(-1, keepdim=True)
        target = torch.where(total > 0, target / total, 0.0)
        # A row without any other block has no gradient.
        logit = torch.zeros_like(mine) if with_own else torch.where(valid.any(-1, keepdim=True), -1e9, 0.0).double()
        z = torch.cat([found.masked_fill(~valid, -torch.inf), logit.expand_as(mine)], -1).log_softmax(-1)
        terms = torch.where(target > 0, target * (target.clamp(min=1e-300).log() - z), 0.0).sum(-1)
        by_row = F.pad(weight, (0, len(rows) * queries - n)).unflatten(2, (-1, queries)).sum(3)[:, :, some]
        # The last row has fewer queries than the others, and weighs the same.
        by_row = by_list((by_row > 0) * (queries * mean[..., None] if saliency else 1.0))
        told = told + 0.7 * (by_row * terms).sum() / by_row.sum()
        # With saliency an estimate of the sum over all rows, which scales with the gradient of the task.
        average = len(rows) * (by_row * terms).mean(-1).sum() if saliency else terms.mean()
        loss = loss + 0.7 * average
    assert float(batch.results()["loss"]) == pytest.approx(told.item(), rel=1e-9)
    for mine, wanted in zip(got, torch.autograd.grad(loss, (chosen, dense)), strict=True):
        assert error(mine, wanted) < 1e-10


def scorer_gradients(module, x, target, parts=1, is_causal=True):
    """Gradients of the scorer after backward passes over parts of a batch, each with the same drawn rows."""
    module.zero_grad()
    for some in zip(*(y.chunk(parts) for y in (*x, target)), strict=True):
        torch.manual_seed(0)
        loss = (module(*some[:3], is_causal) - some[3]).square().mean() / parts
        loss.backward()
    return torch.cat([p.grad.flatten() for p in scorer_parameters(module)])


def trainable(**more):
    torch.manual_seed(0)
    settings = {"base_sparsity": 0.6, "local_blocks": 1, "sink_blocks": 0, "score_unit": 4, "distill_rows": 1.0}
    config = AdaptiveConfig(**(settings | more))
    module = BlockSparseAdaptive([256], [1], 2, 16, config, block_size=16, backend="cpu").double()
    return module, torch.randn(3, 4, 150, 2, 16, dtype=torch.float64).unbind(), torch.randn(4, 150, 2, 16).double()


@BOTH
@ROWS
def test_micro_batches_give_the_gradient_of_the_batch(granularity, is_causal):
    module, x, target = trainable(granularity=granularity)
    whole = scorer_gradients(module, x, target, 1, is_causal)
    assert error(scorer_gradients(module, x, target, 4, is_causal), whole) < 1e-10
    assert error(scorer_gradients(module, x, target, 2, is_causal), whole) < 1e-10


@ROWS
def test_the_scorer_gradient_scales_with_the_loss(granularity):
    module, x, target = trainable(granularity=granularity)
    grads = []
    for scale in (1.0, 1000.0):
        module.zero_grad()
        torch.manual_seed(0)
        (scale * (module(*x, True) - target).square().mean()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert error(grads[1] / 1000, grads[0]) < 1e-12


@pytest.mark.parametrize(("granularity", "unit"), [("token", 4), ("block", 1), ("block", 4)])
def test_rows_count_equally_and_queries_by_saliency(granularity, unit):
    """The part of the sequence with a loss sets the scale. Within rows of several queries it also decides which count."""
    module, x, target = trainable(granularity=granularity, score_unit=unit)
    target = F.normalize(target, dim=-1)

    def gradient(weight):
        module.zero_grad()
        torch.manual_seed(0)
        output = module(*x, True)
        output.backward(target * weight[:, None, None])
        return torch.cat([p.grad.flatten() for p in module.parameters()])

    first = (torch.arange(150) % 2).double()
    one, other, both = gradient(first), gradient(1 - first), gradient(torch.ones(150))
    single = granularity == "token" or unit == 1
    assert error(one, other) < 1e-10 if single else error(one, other) > 0.02
    assert error(one + other, both) < (1e-10 if single else 0.02)


def test_rows_with_dense_statistics_are_those_asked_for():
    for memory, wanted in ((2**27, 0.02), (2**22, 15 / 8192)):
        settings = {"distill_rows": 0.02, "distill_memory": memory, "distill_min_tokens": 1, "score_unit": 16}
        config = AdaptiveConfig(base_sparsity=0.9, **settings)
        module = BlockSparseAdaptive([8192], [1], 2, 16, config, block_size=64)
        module(*torch.randn(3, 1, 8192, 2, 16), is_causal=True)
        assert module.statistics()["dense_rows"] == pytest.approx(wanted, rel=0.02)
    for rows, least, wanted in ((0.1, 16, 20), (0.02, 64, 64), (0.02, 1000, 200), (0.0, 64, 0)):
        config = AdaptiveConfig(distill_rows=rows, distill_min_tokens=least)
        module = BlockSparseAdaptive([8192], [1], 2, 16, config, block_size=16)
        module(*torch.randn(3, 1, 200, 2, 16), is_causal=True)
        assert module.statistics()["dense_rows"] == wanted / 200


def test_few_listed_rows_weigh_less_than_many():
    def trained(weight=None, **settings):
        torch.manual_seed(0)
        module = BlockSparseAdaptive([512], [1], 2, 16, AdaptiveConfig(0.7, **settings), block_size=16)
        output = module(*torch.randn(3, 1, 512, 2, 16), is_causal=True)
        batch = module._batch
        if weight is not None:
            batch.chosen_weight = weight
        output.square().sum().backward()
        return batch, torch.cat([x.grad.flatten() for x in module.parameters()])

    little = {"distill_memory": 2**21}
    batch, _ = trained(**little)
    assert 1 < batch.chosen < 100 and batch.chosen_weight == batch.chosen / 256
    none, half, whole = (trained(weight, **little)[1] for weight in (0.0, 0.5, 1.0))
    assert error(half, (none + whole) / 2) < 1e-5 and error(none, whole) > 0.05
    assert [trained(**more)[0].chosen_weight for more in ({}, little | {"distill_rows": 0.0})] == [1.0, 1.0]


def test_parameters_of_scorers_and_task_are_apart():
    core = BlockSparseAdaptive([64], [1], 2, 4, block_size=16)
    model = torch.nn.ModuleDict({"in": torch.nn.Linear(3, 3), "core": core, "again": core})
    scorers, task = scorer_parameters(model), task_parameters(model)
    assert {id(p) for p in scorers} == {id(p) for p in core.parameters()}
    assert [id(p) for p in task] == [id(p) for p in model["in"].parameters()]


def test_a_dense_start_counts_backward_passes():
    config = AdaptiveConfig(base_sparsity=0.8, dense_steps=2, distill_start=3)
    module = BlockSparseAdaptive([256], [1], 2, 16, config, block_size=16)
    x = list(torch.randn(3, 1, 160, 2, 16).unbind())
    x[0].requires_grad_()
    densities, learns = [], []
    for _ in range(5):
        module.zero_grad()
        output = checkpoint(module, *x, True, use_reentrant=False)
        densities.append(module.statistics()["density"])
        output.square().mean().backward()
        learns.append(module.scorer.match_key.grad is not None)
    assert densities[:2] == [1.0, 1.0] and max(densities[2:]) < 0.5
    assert learns == [False, False, False, True, True]
    assert module.state_dict()["training_steps"] == 5
    again = BlockSparseAdaptive([256], [1], 2, 16, config, block_size=16)
    again.load_state_dict(module.state_dict())
    assert not again.is_dense_start() and again.is_distilling()
    # Evaluation selects from the first step on.
    fresh = BlockSparseAdaptive([256], [1], 2, 16, config, block_size=16).eval()
    fresh(*x, True)
    assert fresh.statistics()["density"] < 0.5
    assert "training_steps" not in BlockSparseAdaptive([256], [1], 2, 16, block_size=16).state_dict()


def test_calls_in_one_backward_pass_are_one_step():
    module = BlockSparseAdaptive([256], [1], 2, 16, AdaptiveConfig(dense_steps=9), block_size=16)
    x = torch.randn(2, 64, 2, 16, requires_grad=True)
    for step in (1, 2):
        parts = [module(own, own, own, True) for own in (x[:1], x[1:, 20:])]
        sum(part.sum() for part in parts).backward()
        assert module.training_steps == step


def test_statistics_after_a_step():
    module = BlockSparseAdaptive([256], [1], 2, 16, AdaptiveConfig(base_sparsity=0.5), block_size=16)
    module(*torch.randn(3, 1, 160, 2, 16)).sum().backward()
    stats = module.statistics()
    assert stats.keys() == {"density", "dense_rows", "coverage", "entropy", "loss"}
    assert stats["dense_rows"] == 0.8, "128 tokens are 8 of 10 blocks"
    assert 0.45 < stats["density"] < 0.6
    assert 0.3 < stats["coverage"] < 0.8
    assert 0 < stats["entropy"] <= 2.31
    assert stats["loss"] == float(module.auxiliary_loss())


@BOTH
@pytest.mark.parametrize(("peak", "wanted", "steps"), [(8.0, 0.98, 200), (4.0, 0.90, 400)])
def test_a_planted_needle_is_found(peak, wanted, steps, is_causal):
    """A score that starts without knowledge: the MLP alone where blocks choose, an unrelated match where tokens do."""
    torch.manual_seed(0)
    module = tasks.needle_layer(is_causal)
    before = tasks.recall(module, peak, is_causal)
    for _ in tasks.teach_needle(module, peak, is_causal, steps // 4):
        pass
    assert before < 0.3
    assert tasks.recall(module, peak, is_causal) >= wanted


def test_coverage_keeps_fewer_blocks_of_peaked_attention():
    torch.manual_seed(0)
    kept, held = tasks.adaptivity(steps=150)
    assert kept["needle"] <= 0.25 * kept["diffuse"]
    # Seeds and steps reach 0.84 to 0.89 of diffuse attention.
    assert min(held.values()) >= 0.82


def look_ups(axes: torch.Tensor) -> LayerCall:
    """Each query looks for one key, with more or less attention: one of many in a block of queries."""
    key = torch.randn(2, 512, 2, 32) @ axes
    target = torch.randint(512, (2, 512, 1, 1)).expand_as(key)
    return LayerCall(key.gather(1, target) * torch.rand(2, 512, 1, 1), key, torch.randn_like(key), False, None)


def test_blocks_of_queries_learn_what_their_queries_seek():
    torch.manual_seed(0)
    axes = torch.linalg.qr(torch.randn(32, 32))[0] * (4.0 * 0.85 ** torch.arange(32))
    config = AdaptiveConfig(0.85, k_min=1, local_blocks=1, sink_blocks=0, match_rank=8, hidden_dim=8)
    module = BlockSparseAdaptive([512], [1], 2, 32, config, block_size=16)
    start, optimizer = copied_state(module), torch.optim.Adam(module.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        distill_layer(module, look_ups(axes))
        optimizer.step()
    found = shares_of(captured_mass(module, look_ups(axes), start, 512))
    gain = {name: (found[name] - found["random"]) / (found["oracle"] - found["random"]) for name in found}
    assert gain["learned"] > 0.9 and gain["learned"] > gain["untrained"] + 0.25, gain


@pytest.mark.slow
def test_looking_up_what_an_earlier_block_told():
    reached = {name: max(curve.values()) for name, curve in tasks.lookup(("dense", "local", "random", "token"), 50)}
    assert reached["dense"] >= 0.99
    assert reached["token"] >= 0.95
    assert reached["token"] >= reached["local"] + 0.40
    assert reached["local"] <= 0.55
    assert reached["random"] <= 0.60


def test_learning_to_look_up_beats_the_window():
    """The same in fewer steps: what a window cannot hold is found."""
    torch.manual_seed(0)
    example = loaded("examples/adaptive_retrieval.py")
    window = SparseAttention("hierarchical:4x1;block=16")
    local = dict(example.train(example.Reader(window), 20, batch=16))
    learned = dict(example.train(example.Reader(tasks.lookup_layer("token")), 20, batch=16))
    assert learned[20] >= local[20] + 0.25
