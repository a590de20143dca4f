"""Learned attention over ranks: this rank's rows of what one device chooses and computes, and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import error
from processes import all_pass
from worlds import run_threads

from dilated_attention_pytorch.distributed import SequenceLayout, shard_sequence
from dilated_attention_pytorch.distributed.learned import Choice, select_blocks
from dilated_attention_pytorch.nn import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    MultiheadBlockSparseAdaptive,
    fit_scorers,
    set_process_group,
)
from dilated_attention_pytorch.selection import scores as scores_module

N, HEADS, KEY_HEADS, WIDTH = 150, 4, 2, 8
LAYOUTS = {
    2: [SequenceLayout.contiguous(N, 2), SequenceLayout.of_lengths([37, 113])],
    3: [SequenceLayout.of_lengths([60, 0, 90]), SequenceLayout.zigzag(N, 3)],
}


def config(**more) -> AdaptiveConfig:
    settings = {"base_sparsity": 0.6, "local_blocks": 2, "sink_blocks": 1, "score_unit": 4, "distill_rows": 0.1}
    return AdaptiveConfig(**{**settings, **more})


def answer(module, tensors, grad, seed, **settings):
    """Output, gradients of the inputs and of the parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    torch.manual_seed(seed)
    output = module(*leaves, **settings)
    output = output[0] if isinstance(output, tuple) else output
    (output * grad).sum().backward()
    return [output.detach()], [x.grad for x in leaves], [p.grad for p in module.parameters()]


def weights(make):
    torch.manual_seed(0)
    return make().double().state_dict()


def same_rows(make, layout, rank, group, shapes, padded=False, training=True, state=None, **settings):
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(2, N, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    grad = torch.randn(2, N, *shapes[0], generator=generator, dtype=torch.float64)
    padding = torch.arange(N) >= torch.tensor([N, 101])[:, None] if padded else None
    state = weights(make) if state is None else state
    alone = make().double().train(training)
    over = make(layout=layout, process_group=group).double().train(training)
    for module in (alone, over):
        module.load_state_dict(state)
    masks = {} if padding is None else {"key_padding_mask": padding}
    wanted = answer(alone, whole, grad, 3, **settings, **masks)
    masks = {} if padding is None else {"key_padding_mask": shard_sequence(padding, layout, rank, 1)}
    parts = [shard_sequence(x, layout, rank, 1) for x in (*whole, grad)]
    # The first rank's luck is that of all.
    found = answer(over, parts[:-1], parts[-1], 3 + rank, **settings, **masks)
    for got, want in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
        assert error(got, shard_sequence(want, layout, rank, 1)) <= 1e-12
    core, other = getattr(over, "core", over), getattr(alone, "core", alone)
    assert core.statistics() == pytest.approx(other.statistics(), rel=1e-9)
    if training:
        for got, want in zip(found[2], wanted[2], strict=True):
            if want is None:
                assert got is None
                continue
            total = got.clone()
            dist.all_reduce(total, group=group)
            assert error(total, want) <= 1e-12


CORE = [(HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH)]


def core(**more):
    chosen = config(**more)
    sizes = {"block_size": 16, "num_kv_heads": KEY_HEADS}
    return lambda **ranks: BlockSparseAdaptive([256], [1], HEADS, WIDTH, chosen, backend="cpu", **sizes, **ranks)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("granularity", "is_causal"), [("auto", True), ("auto", False), ("block", True)])
def test_ranks_on_threads_give_the_rows_of_one_device(world, granularity, is_causal):
    make = core(granularity=granularity, score_unit=1)
    # Threads share one generator: the weights are drawn before they start.
    state = weights(make)

    def check(rank, _):
        for layout in LAYOUTS[world]:
            same_rows(make, layout, rank, dist.group.WORLD, CORE, training=False, state=state, is_causal=is_causal)

    run_threads(check, world)


def test_candidates_are_those_of_one_device(monkeypatch):
    monkeypatch.setattr(scores_module, "ALL_PAIRS", 4)
    monkeypatch.setattr(scores_module, "SUPER", 2)
    make = core(granularity="block", base_sparsity=0.8, local_blocks=1)
    state = weights(make)

    def check(rank, world):
        for is_causal in (False, True):
            same_rows(
                make, LAYOUTS[2][1], rank, dist.group.WORLD, CORE, training=False, state=state, is_causal=is_causal
            )

    run_threads(check, 2)


def test_a_rank_asks_for_what_its_rows_see_and_no_more():
    layout = SequenceLayout.of_lengths([60, 5, 85])
    torch.manual_seed(0)
    chosen = torch.randint(0, 10, (2, HEADS, 10, 1), dtype=torch.int32)

    def check(rank, world):
        positions = layout.positions(rank)
        rows = torch.unique(positions // 16)
        indices = chosen[:, :, rows]
        choice = Choice(layout, rank, dist.group.WORLD, rows, indices, 16, False, False, 1, 1)
        part = select_blocks(choice, choice.seen(), KEY_HEADS)
        wanted = set()
        for head in range(HEADS):
            for at, row in enumerate(rows.tolist()):
                blocks = {0, row, *chosen[:, head, row].flatten().tolist()}
                assert set(choice.seen()[:, head, at].flatten().tolist()) <= {*blocks, 10}
                seen = {(head // 2, token) for block in blocks for token in range(16 * block, min(16 * block + 16, N))}
                wanted |= {(g, token) for g, token in seen if token not in positions.tolist()}
        assert set(part.exchange.request.codes.tolist()) == {g * N + token for g, token in wanted}

    run_threads(check, 3)


def learning(rank: int, world: int) -> None:
    group, (layout, other) = dist.group.WORLD, LAYOUTS[world]
    same_rows(core(score_unit=1), layout, rank, group, CORE, is_causal=True)
    same_rows(core(), other, rank, group, CORE)
    same_rows(core(adaptive_ratio=0.6), layout, rank, group, CORE, padded=True)
    same_rows(
        core(granularity="token", dropout=0.3, local_blocks=1), other, rank, group, CORE, is_causal=True, padded=True
    )
    same_rows(core(granularity="block", distill_rows=0.0), other, rank, group, CORE, is_causal=True)
    same_rows(core(base_sparsity=0.0), layout, rank, group, CORE, is_causal=True)
    # Few rows are compared on their listed blocks, and weigh less.
    same_rows(core(distill_memory=2**17), other, rank, group, CORE, is_causal=True)
    same_rows(core(select="group"), other, rank, group, CORE, is_causal=True, padded=True)
    same_rows(core(select="all", granularity="block"), layout, rank, group, CORE)


def multihead(rank: int, world: int) -> None:
    group, layout = dist.group.WORLD, LAYOUTS[world][1]

    def make(process_group=None, **more):
        built = MultiheadBlockSparseAdaptive(
            32, HEADS, [256], [1], 0.0, True, config(), block_size=16, position="rotary", num_kv_heads=2, **more
        )
        set_process_group(built, process_group)
        return built

    same_rows(make, layout, rank, group, [(32,)], is_causal=True)


@pytest.mark.parametrize("world", [2, 3])
def test_every_gradient_is_that_of_one_device(world):
    all_pass(learning, world)


def test_the_multihead_form_knows_where_its_tokens_stand():
    all_pass(multihead, 3)


def refusals(rank: int, world: int) -> None:
    group = dist.group.WORLD
    x = torch.randn(3, 1, 40, HEADS, WIDTH).unbind()
    for build, call, words in (
        (core(), {"return_pattern": True}, "return_pattern must come with one device"),
        (core(hard_sparsity=False), {}, "must keep blocks as they are"),
    ):
        with pytest.raises(ValueError, match=words):
            build(process_group=group)(*x, **call)
    dropped = BlockSparseAdaptive([256], [1], HEADS, WIDTH, attention_dropout=0.1, process_group=group)
    with pytest.raises(ValueError, match="attention_dropout must be 0"):
        dropped(*x)
    # One rank's mistake reaches all of them.
    with pytest.raises(ValueError, match="4 heads of 8"):
        core()(process_group=group)(*(y[:, :, : 2 if rank else HEADS] for y in x))
    with pytest.raises(ValueError, match="the same call"):
        core(k_min=2 + rank)(process_group=group)(*x)
    with pytest.raises(ValueError, match="a cache must come with one device"):
        module = MultiheadBlockSparseAdaptive(32, HEADS, [256], [1], block_size=16, process_group=group).eval()
        module(torch.randn(1, 4, 32), is_causal=True, cache=module.cache())


def test_what_ranks_cannot_do_is_refused_by_all():
    all_pass(refusals, 2)


def sharded(rank: int, world: int) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    alone, over = (BlockSparseAdaptive([256], [1], HEADS, WIDTH, config(), block_size=16) for _ in range(2))
    over.load_state_dict(alone.state_dict())
    x = torch.randn(3, 1, N, HEADS, WIDTH).unbind()
    for module in (alone, fully_shard(over)):
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            module(*x, True).square().sum().backward()
            optimizer.step()
    whole, wanted = StateDictOptions(full_state_dict=True), alone.state_dict()
    found = get_model_state_dict(over, options=whole)
    assert list(found) == list(wanted)
    assert max(error(found[name], value) for name, value in wanted.items()) < 1e-6
    over.load_state_dict(over.state_dict())
    set_model_state_dict(over, {name: value * 2 for name, value in wanted.items()}, options=whole)
    found = get_model_state_dict(over, options=whole)
    assert all(torch.equal(found[name], value * 2) for name, value in wanted.items())
    # One rank alone has the values; the loader fills the dictionary it is given.
    sent = {name: value * 3 for name, value in wanted.items()} if rank == 0 else {}
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(over, sent, options=broadcast)
    found = get_model_state_dict(over, options=whole)
    assert all(torch.equal(found[name], value * 3) for name, value in wanted.items())


def test_fully_sharded_layers_train_and_keep_their_names():
    all_pass(sharded, 2)


def test_ranks_fit_one_start_from_the_data_of_all():
    shape = 2, 64, HEADS, WIDTH
    data = [torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    torch.manual_seed(0)
    alone, state = (BlockSparseAdaptive([64], [1], HEADS, WIDTH, config(match_rank=4), block_size=16) for _ in range(2))
    alone.load_state_dict(state.state_dict())
    fit_scorers(alone, lambda: alone(*torch.cat(data, 1)))

    def check(rank: int, world: int) -> None:
        own = BlockSparseAdaptive([64], [1], HEADS, WIDTH, config(match_rank=4, dense_steps=1), block_size=16)
        own.scorer.load_state_dict(state.scorer.state_dict())
        own._steps = 1
        own(*data[rank])
        assert own.scorer.is_untrained()
        assert fit_scorers(own, lambda: own(*data[rank])) == [""]
        assert error(own.scorer.match_key, alone.scorer.match_key) <= 1e-5

    with pytest.warns(UserWarning, match="call fit_scorers"):
        run_threads(check, 2)
