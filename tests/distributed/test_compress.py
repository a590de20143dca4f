"""Gradient compression on real gloo processes: bytes, equal bits on all ranks, and nothing lost."""

from __future__ import annotations

import functools
import io
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from processes import all_pass
from torch import nn

from dilated_attention_pytorch.distributed.gradient_compression import (
    BlockTopK,
    GradientBuckets,
    PowerSGD,
    TopK,
    compress_fsdp,
    ddp_hook,
)

NUMBERS = 50_000
BAR = 0.10
"""Most of the dense bytes that block top-k at ratio 0.08 may send."""


class Wire:
    """Counts what goes through collectives, beside what the library says of itself."""

    def __init__(self, group) -> None:
        self.world, self.sent = dist.get_world_size(group), 0.0

    def __enter__(self):
        self.kept = dist.all_reduce, dist.all_gather
        dist.all_reduce = functools.partial(self._count, self.kept[0], lambda w: 2 * (w - 1) / w, 0)
        dist.all_gather = functools.partial(self._count, self.kept[1], lambda w: w - 1, 1)
        return self

    def _count(self, call, times, at, *args, **kwargs):
        self.sent += times(self.world) * args[at].numel() * args[at].element_size()
        return call(*args, **kwargs)

    def __exit__(self, *_):
        dist.all_reduce, dist.all_gather = self.kept


def gradients(rank: int, step: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(NUMBERS, generator=generator, dtype=dtype) * torch.linspace(0, 3, NUMBERS, dtype=dtype).exp()


def same_on_all(tensor, group) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, tensor, group=group)
    return all(other.equal(tensor) for other in every)


def compression_keeps_its_promises(rank: int, world: int) -> dict[int, float]:
    """For 2, 4 and 8 ranks: bytes, bits, the law of error feedback, and resuming."""
    shares = {}
    for size in (2, 4, 8):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        compression = BlockTopK(0.08, group=group, start=0)
        with Wire(group) as wire:
            mean = compression.average("a", gradients(rank, 0, torch.float32))
        assert wire.sent == pytest.approx(compression.sent)
        assert same_on_all(mean, group)
        shares[size] = wire.sent / compression.dense
        assert shares[size] == pytest.approx(compression.share(size), rel=0.01)
        for make in (BlockTopK, TopK):
            law(make(0.08, group=group, start=1), rank, size, group)
        top = TopK(0.1, group=group, start=0)
        with Wire(group) as wire:
            mean = top.average("a", gradients(rank, 0, torch.float32))
        assert same_on_all(mean, group)
        assert wire.sent / top.dense == pytest.approx(0.1 * size, rel=0.01)
        whole = BlockTopK(1.0, group=group, start=0).average("a", gradients(rank, 0))
        exact = sum(gradients(r, 0) for r in range(size)) / size
        assert (whole - exact).abs().max() <= 1e-12 * exact.abs().max()
        half = BlockTopK(0.08, group=group, start=0)
        half.average("a", gradients(rank, 0, torch.float32).bfloat16())
        assert half.sent / half.dense <= BAR
    return shares


def through_a_file(state):
    """As a checkpoint would come back, read without trusting it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def law(compression, rank: int, size: int, group) -> None:
    """What was applied and what is kept add up to the gradients; a copy made half-way goes on with the same bits."""
    applied = total = torch.zeros(NUMBERS, dtype=torch.float64)
    for step in range(5):
        if step == 3:
            resumed = type(compression)(compression.ratio, group=group, start=1)
            resumed.load_state_dict(through_a_file(compression.state_dict()))
        mean = compression.average("a", gradients(rank, step))
        if step >= 3:
            assert resumed.average("a", gradients(rank, step)).equal(mean)
        applied = applied + mean
        total = total + sum(gradients(r, step) for r in range(size)) / size
    kept = compression.errors["a"].clone()
    dist.all_reduce(kept, group=group)
    assert (applied + kept / size - total).abs().max() <= 1e-14 * total.abs().max()
    assert (applied - total).abs().max() > 1e-3 * total.abs().max()


@pytest.mark.timeout(120)
def test_block_top_k_sends_a_tenth_and_loses_nothing():
    answers = all_pass(compression_keeps_its_promises, 8)
    assert set(answers[0]) == {2, 4, 8}
    assert all(share <= BAR for shares in answers.values() for share in shares.values())


def training(rank: int, world: int) -> None:
    hooks_train_as_the_bucketer_does(rank, world)
    error_feedback_matters(rank, world)
    one_block_and_what_fills_none_always_go(rank, world)
    half_precision_and_no_numbers(rank, world)
    half_precision_at_its_limit(rank, world)
    gradients_absent_somewhere(rank, world)
    power_sgd_resumes(rank, world)
    fsdp_shards_are_averaged_between_nodes(rank, world)


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8)).double()


def batch_of(rank: int, step: int):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 24, generator=generator, dtype=torch.float64) + rank
    return x, x[:, :8].sin()


def train(model, steps: int, rank: int, after_backward=None, begin: int = 0) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for step in range(begin, begin + steps):
        x, y = batch_of(rank, step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def hooks_train_as_the_bucketer_does(rank: int, world: int) -> None:
    ddp = nn.parallel.DistributedDataParallel(model_of())
    state = BlockTopK(0.2, block=8)
    ddp.register_comm_hook(GradientBuckets(ddp.parameters(), state), ddp_hook)
    by_hook = train(ddp, 6, rank)
    assert state.dense > state.sent > 0

    model = model_of()
    buckets = GradientBuckets(model.parameters(), BlockTopK(0.2, block=8))
    by_hand = train(model, 6, rank, buckets.synchronize)
    dense = model_of()
    plain = train(dense, 6, rank, GradientBuckets(dense.parameters(), count=1).synchronize)
    for hook, hand, exact in zip(by_hook, by_hand, plain, strict=True):
        assert same_on_all(hook, None)
        assert same_on_all(hand, None)
        assert same_on_all(exact, None)
        assert hook.equal(hand)
        assert (hand - exact).abs().max() < 0.1
    alone = model_of()
    optimizer = torch.optim.SGD(alone.parameters(), 0.02)
    for step in range(6):
        optimizer.zero_grad()
        losses = [(alone(x) - y).square().mean() for x, y in (batch_of(r, step) for r in range(world))]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for exact, wanted in zip(plain, alone.parameters(), strict=True):
        assert torch.allclose(exact, wanted, atol=1e-13)


def error_feedback_matters(rank: int, world: int) -> None:
    """A direction whose gradient is never among the largest is learnt with feedback alone."""
    found = {}
    for feedback in (True, False):
        compression = TopK(0.5, start=0, error_feedback=feedback)
        found[feedback] = sum(compression.average("a", torch.tensor([1.0, 0.4])) for _ in range(10))
    assert found[False][1] == 0
    assert found[True][1] == pytest.approx(4.0, abs=0.5)


def hooks_compose_with_those_of_torch(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

    ddp, plain = (nn.parallel.DistributedDataParallel(Crossed(), bucket_cap_mb=0.005) for _ in range(2))
    buckets = GradientBuckets(ddp.parameters(), BlockTopK(1.0, start=0))
    ddp.register_comm_hook(buckets, fp16_compress_wrapper(ddp_hook))
    for narrow, exact in zip(train(ddp, 3, rank), train(plain, 3, rank), strict=True):
        assert same_on_all(narrow, None)
        assert 0 < (narrow - exact).abs().max() < 1e-3


def bad_numbers_last_one_step(rank: int, world: int) -> None:
    """A rank without finite gradients spoils that step alone; the gradients of the others are not lost."""
    for make in (BlockTopK, TopK):
        for bad in (float("nan"), float("inf")):
            compression, applied, total = make(0.08, start=0), 0.0, 0.0
            for step in range(20):
                gradient = gradients(rank, step)[:5003]
                spoilt = step == 3 and rank == 1
                own = gradient.clone()
                total = total + (0.0 if spoilt else own)
                mean = compression.average("a", gradient.fill_(bad) if spoilt else gradient)
                assert same_on_all(mean.nan_to_num(7.0), None)
                if step == 3:
                    assert mean.isnan().all()
                else:
                    assert mean.isfinite().all()
                    applied = applied + mean
                assert compression.errors["a"].isfinite().all()
            for sums in (kept := compression.errors["a"].clone(), total):
                dist.all_reduce(sums)
            assert (applied + kept / world - total / world).abs().max() <= 1e-12 * total.abs().max()


class Crossed(nn.Module):
    """Layers of one shape, used in another order than they are defined in: DDP's buckets change after a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5)).double()

    def forward(self, x):
        for index in (3, 0, 4, 1, 2):
            x = self.layers[index](x).tanh()
        return x[:, :8]


def ddp_of(cap: float):
    ddp = nn.parallel.DistributedDataParallel(Crossed(), bucket_cap_mb=cap)
    compression = BlockTopK(0.2, block=8)
    ddp.register_comm_hook(GradientBuckets(ddp.parameters(), compression, size_mb=0.01), ddp_hook)
    return ddp, compression


def ddp_resumes_bit_for_bit(rank: int, world: int) -> None:
    """From the first step of the new process on, whatever DDP's buckets are."""
    for cap in (25, 0.005):
        whole, kept = ddp_of(cap)
        train(whole, 5, rank)
        again, resumed = ddp_of(cap)
        again.module.load_state_dict(whole.module.state_dict())
        resumed.load_state_dict(through_a_file(kept.state_dict()))
        for one, other in zip(train(whole, 3, rank, begin=5), train(again, 3, rank, begin=5), strict=True):
            assert one.equal(other)
            assert same_on_all(one, None)
    other, loaded = Crossed(), BlockTopK(0.2, block=8)
    loaded.load_state_dict(kept.state_dict())
    with pytest.raises(ValueError, match=r"(?s)expected a gradient of the loaded state.*bucket sizes"):
        train(other, 1, rank, GradientBuckets(other.parameters(), loaded, count=1).synchronize)
    ddp = nn.parallel.DistributedDataParallel(Crossed())
    ddp.register_comm_hook(BlockTopK(0.2), ddp_hook)
    with pytest.raises(TypeError, match="expected the state of ddp_hook to be a GradientBuckets"):
        train(ddp, 1, rank)


def states_of_ranks_stay_apart(rank: int, world: int) -> None:
    """`torch.distributed.checkpoint` keeps one tensor of those that have one name on several ranks."""
    import torch.distributed.checkpoint as dcp

    compression = TopK(0.5, start=0)
    compression.average("a", gradients(rank, 0)[:100])
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"compression": compression.state_dict()}, checkpoint_id=folder[0])
    state = compression.state_dict()
    own = next(key for key in state if key.startswith("rank "))
    state[own]["a"].zero_()
    dcp.load({"compression": state}, checkpoint_id=folder[0])
    fresh = TopK(0.5, start=0)
    fresh.load_state_dict(state)
    assert fresh.errors["a"].equal(compression.errors["a"])
    assert not same_on_all(fresh.errors["a"], None)
    moved = {"rank 9 of 12" if key == own else key: value for key, value in state.items()}
    with pytest.raises(ValueError, match=f"expected the state of rank {rank} of {world}, got that of rank 9 of 12"):
        fresh.load_state_dict(moved)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def half_precision_and_no_numbers(rank: int, world: int) -> None:
    """What bfloat16 rounds away is kept too, and a NaN passes through once."""
    for make in (BlockTopK, TopK):
        compression = make(0.5, start=0)
        steps = [torch.full((128,), 1.0 + rank / 64 + step / 512).bfloat16() * 1.01 for step in range(6)]
        applied = sum(compression.average("a", gradient.clone()).double() for gradient in steps)
        assert compression.errors["a"].dtype == torch.float32
        kept = compression.errors["a"].double()
        dist.all_reduce(kept)
        total = sum(gradient.double() for gradient in steps)
        dist.all_reduce(total)
        assert (applied + kept / world - total / world).abs().max() < 0.05
        bad = torch.ones(128)
        bad[3 if rank == 0 else 100] = float("nan")
        plain = make(0.5, start=0)
        assert plain.average("a", bad).isnan().any()
        for _ in range(3):
            last = plain.average("a", torch.ones(128))
        assert last.isfinite().all()
        assert plain.errors["a"].isfinite().all()


def half_precision_at_its_limit(rank: int, world: int) -> None:
    """Sums of these float16 gradients overflow, their means do not; what no float16 holds waits in the error."""
    for make in (BlockTopK, TopK):
        for start in (0, 2):
            compression, applied = make(0.5, start=start), 0.0
            gradient = torch.full((256,), 60_000.0, dtype=torch.float16)
            gradient[128:] = 50_000.0 + 1000 * rank
            for _ in range(3):
                mean = compression.average("a", gradient.clone())
                assert mean.isfinite().all() and same_on_all(mean, None)
                applied = applied + mean.double()
            errors = compression.errors["a"].double()
            dist.all_reduce(errors)
            wanted = gradient.double() * 3
            dist.all_reduce(wanted)
            assert (applied + errors / world - wanted / world).abs().max() <= 3 * 65504 * 2**-11
    parameter = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 60_000.0)
    GradientBuckets([parameter]).synchronize()
    assert parameter.grad.eq(60_000).all()


def one_block_and_what_fills_none_always_go(rank: int, world: int) -> None:
    for numbers in (1, 63, 64, 130):
        compression = BlockTopK(0.08, start=0)
        mean = compression.average("a", torch.full((numbers,), float(rank)))
        assert mean.ne(0).sum() == min(numbers, 64 + numbers % 64)
        assert mean[mean.ne(0)].eq((world - 1) / 2).all()
        assert (mean != 0).logical_xor(compression.errors["a"] != 0).all() or rank == 0


def gradients_absent_somewhere(rank: int, world: int) -> None:
    used, elsewhere, nowhere = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    used.grad = torch.full((3,), float(rank))
    if rank == 1:
        elsewhere.grad = torch.full((3,), float(world))
    GradientBuckets([used, elsewhere, nowhere]).synchronize()
    assert used.grad.tolist() == [(world - 1) / 2] * 3
    assert elsewhere.grad.tolist() == [1.0] * 3
    assert nowhere.grad is None


def power_sgd_resumes(rank: int, world: int) -> None:
    options = {"min_compression_rate": 1, "warm_start": False}
    whole, power = nn.parallel.DistributedDataParallel(model_of()), PowerSGD(2, **options)
    whole.register_comm_hook(power.state, power.hook)
    train(whole, 4, rank)
    again, resumed = nn.parallel.DistributedDataParallel(model_of()), PowerSGD(2, **options)
    again.register_comm_hook(resumed.state, resumed.hook)
    with pytest.raises(ValueError, match="after the first step of DDP"):
        resumed.load_state_dict(power.state_dict())
    # DDP lays out its buckets anew after its first step; the resumed one must be past that too.
    train(again, 1, rank)
    again.module.load_state_dict(whole.module.state_dict())
    resumed.load_state_dict(through_a_file(power.state_dict()))
    for one, other in zip(train(whole, 2, rank, begin=4), train(again, 2, rank, begin=4), strict=True):
        assert one.equal(other)
        assert same_on_all(one, None)


def fsdp_shards_are_averaged_between_nodes(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    model = model_of().float()
    fully_shard(model, mesh=mesh["shard"])
    state = BlockTopK(1.0, group=mesh["node"].get_group(), start=0)
    compress_fsdp(model, state)
    x, y = batch_of(rank, 0)
    (model(x.float()) - y.float()).square().mean().backward()
    assert state.dense > 0
    alone = model_of().float()
    losses = [(alone(x.float()) - y.float()).square().mean() for x, y in (batch_of(r, 0) for r in range(world))]
    torch.stack(losses).mean().backward()
    for sharded, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(sharded.grad.full_tensor(), whole.grad, atol=1e-6)


@pytest.mark.timeout(120)
def test_hooks_and_buckets_train_as_one_process_does():
    all_pass(training, 4)


def resuming(rank: int, world: int) -> None:
    hooks_compose_with_those_of_torch(rank, world)
    bad_numbers_last_one_step(rank, world)
    ddp_resumes_bit_for_bit(rank, world)
    states_of_ranks_stay_apart(rank, world)


@pytest.mark.timeout(120)
def test_states_resume_on_their_parameters_and_ranks():
    all_pass(resuming, 2)


def test_buckets_end_at_25_mb_or_32_tensors():
    small = [nn.Parameter(torch.zeros(2)) for _ in range(70)]
    assert [len(bucket) for bucket in GradientBuckets(small).buckets] == [32, 32, 6]
    large = [nn.Parameter(torch.empty(2_000_000, device="meta")) for _ in range(7)]
    assert [len(bucket) for bucket in GradientBuckets(large).buckets] == [3, 3, 1]
    mixed = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double()), nn.Parameter(torch.zeros(2))]
    assert [bucket for bucket in GradientBuckets(mixed).buckets] == [[2], [1], [0]]


def test_the_break_even_is_told():
    told = BlockTopK(0.08).explain(100_000_000, world=8)
    assert "8 ranks: 9.56 % of the dense bytes" in told
    assert "predicted to pay on links slower than" in told
    assert "never pays" in TopK(0.1).explain(100_000_000, world=16)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BlockTopK(0.0), "ratio must be a fraction"),
        (lambda: BlockTopK(0.1, block=0), "block must be >= 1"),
        (lambda: TopK(0.1, start=-1), "start must be >= 0"),
        (lambda: GradientBuckets([]), "there must be parameters"),
        (lambda: GradientBuckets([nn.Parameter(torch.zeros(1))], count=0), "count must be >= 1"),
        (lambda: GradientBuckets([nn.Parameter(torch.zeros(1))], size_mb=0), "size_mb must be > 0"),
        (lambda: GradientBuckets([nn.Parameter(torch.zeros(1))], PowerSGD), "BlockTopK or TopK"),
        (lambda: compress_fsdp(nn.Linear(1, 1), TopK(0.1)), "made by fully_shard"),
        (lambda: BlockTopK(0.1).load_state_dict(BlockTopK(0.2).state_dict()), "the state must be of ratio 0.1"),
    ],
)
def test_wrong_arguments_say_what_must_hold(make, says):
    with pytest.raises((TypeError, ValueError), match=says):
        make()
