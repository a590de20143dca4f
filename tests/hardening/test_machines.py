"""Calls after calls in any order: nothing that is kept between them (plans, buffers, keys, graphs) shows in a result."""

from __future__ import annotations

import os

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import answer, error
from strategies import LAYOUTS, laid_out, problems

from dilated_attention_pytorch import attention_with_lse, make_plan, parse
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.nn import KVCache, SparseAttention
from dilated_attention_pytorch.ops import plan_cache

RUNS = int(os.environ.get("DAP_FUZZ_RUNS", "8"))
"""Sequences of calls; a night has time for hundreds."""
BACKENDS = ["auto", "reference", "cpu", *(["native"] if library_path().exists() else [])]
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}
MODULES = ("dilated:16x1,48x3", "window:9 | global:3", "random:0.5;block=16;seed=3", "dilated:12x1,40x4 & causal")
SEEDS = st.integers(0, 2**31)


class Calls(RuleBasedStateMachine):
    """Calls on patterns that come again, with a cache of plans that turns over and graphs that are used later."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[tuple] = []
        self.waiting: list[tuple] = []
        self.modules = {text: SparseAttention(text) for text in MODULES}
        self.limit = plan_cache.limit
        plan_cache.clear()

    def teardown(self) -> None:
        plan_cache.limit = self.limit
        plan_cache.clear()

    @initialize(problem=problems(longest=70, heads=(1, 2, 4)))
    def start(self, problem: tuple) -> None:
        self.meet(problem)

    @rule(problem=problems(longest=70, heads=(1, 2, 4)))
    def meet(self, problem: tuple) -> None:
        """A pattern to be used from now on."""
        pattern, n, heads = problem
        try:
            make_plan(pattern, n, heads)
        except ValueError as refusal:
            assert "must have a head for each" in str(refusal)
            return
        self.known.append(problem)

    @precondition(lambda self: self.known)
    @rule(
        which=st.integers(0, 99),
        seed=SEEDS,
        dtype=st.sampled_from(list(ROUNDING)),
        backend=st.sampled_from(BACKENDS),
        layout=st.sampled_from(LAYOUTS),
        budget=st.sampled_from([None, None, 2**30]),
        later=st.booleans(),
    )
    def call(self, which, seed, dtype, backend, layout, budget, later) -> None:
        """One call on a pattern that was met; its backward pass at once, or after other calls."""
        pattern, n, heads = self.known[which % len(self.known)]
        generator = torch.Generator().manual_seed(seed)
        groups = [g for g in (1, 2, 4) if heads % g == 0][seed % 2 if heads > 1 else 0]
        shapes = [(1, h, n, d) for h, d in ((heads, 8), (groups, 8), (groups, 5), (heads, 5))]
        rows = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        leaves = [laid_out(x, layout).detach().requires_grad_() for x in rows[:3]]
        padding = torch.rand(1, n, generator=generator) < 0.3 if seed % 3 == 0 else None
        asked = {"enable_gqa": True, "key_padding_mask": padding, "backend": backend, "memory_budget": budget}
        output, lse = attention_with_lse(*leaves, pattern, **asked)
        wanted = answer(*leaves, pattern, grad_output=rows[3], key_padding_mask=padding)
        assert error(output, wanted.output) <= ROUNDING[dtype]
        assert error(lse, wanted.lse) <= min(ROUNDING[dtype], 1e-5)
        self.waiting.append((output, leaves, rows[3], wanted, ROUNDING[dtype]))
        if not later:
            self.differentiate(len(self.waiting) - 1)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def differentiate(self, which: int) -> None:
        """The gradients of a call, however many came since."""
        output, leaves, grad, wanted, rounding = self.waiting.pop(which % len(self.waiting))
        for got, want in zip(torch.autograd.grad(output, leaves, grad), wanted[2:], strict=True):
            assert error(got, want) <= 16 * rounding

    @rule(text=st.sampled_from(MODULES), n=st.integers(1, 70), seed=SEEDS, causal=st.booleans())
    def module(self, text: str, n: int, seed: int, causal: bool) -> None:
        """A module that has seen other lengths; its input is changed in place and given again."""
        module, generator = self.modules[text], torch.Generator().manual_seed(seed)
        rows = [torch.randn(1, n, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
        pattern = parse(text) & parse("causal") if causal else parse(text)
        for _ in range(2):
            found = module(*rows, is_causal=causal)
            wanted = answer(*(x.transpose(1, 2) for x in rows), pattern).output.transpose(1, 2)
            assert error(found, wanted) <= 1e-11
            rows[seed % 3].mul_(-0.5)

    @rule(limit=st.sampled_from([0, 2_000, 20_000, 2**29]))
    def limit_plans(self, limit: int) -> None:
        """Room for no plan, for few, for all."""
        plan_cache.limit = limit

    @invariant()
    def plans_are_counted(self) -> None:
        """What the cache says it holds is what it holds."""
        info = plan_cache.info()
        assert info.nbytes == sum(key.nbytes + plan.nbytes for key, plan in plan_cache._plans.items())


DECODED = (
    "causal",
    "window:7 | global:3",
    "window:20 & dilated:32x2",
    "dilated:16x1,64x4",
    "dilated:12x1,30x3;overlap=union",
    "strided:2;block=16",
    "hierarchical:1x1,3x2,0x3;block=16",
    "random:0.4;block=16;seed=1;per_head=1 | window:0",
    "heads{window:4 / causal / dilated:16x4 / block_dilated:32x1;block=16}",
)
LONGEST = 90


class Decoding(RuleBasedStateMachine):
    """Tokens come one at a time or many at once, and samples change places, as in a beam search."""

    @initialize(text=st.sampled_from(DECODED), seed=SEEDS, key_heads=st.sampled_from([1, 2, 4]), uneven=st.booleans())
    def start(self, text: str, seed: int, key_heads: int, uneven: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((2, 4, LONGEST, 8), (2, key_heads, LONGEST, 8), (2, key_heads, LONGEST, 6))
        self.rows = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        self.wanted = answer(*self.rows, parse(text) & parse("causal")).output
        prompt = 1 + seed % 20
        self.lengths = [prompt, 1 + seed % prompt] if uneven else [prompt, prompt]
        self.cache = KVCache(text, LONGEST if "random" in text else None, self.lengths if uneven else None)
        self.sample = [0, 1]
        found = self.cache.attend(*(x[:, :, :prompt] for x in self.rows))
        for sample, length in enumerate(self.lengths):
            assert error(found[sample, :, :length], self.wanted[sample, :, :length]) <= 1e-11

    @precondition(lambda self: max(self.lengths) < LONGEST)
    @rule(many=st.sampled_from([1, 1, 1, 2, 7, 30, 64, 70]))
    def read(self, many: int) -> None:
        """The next tokens of every sample."""
        many = min(many, LONGEST - max(self.lengths))
        tokens = [
            torch.stack([x[s, :, n : n + many] for s, n in zip(self.sample, self.lengths, strict=True)])
            for x in (*self.rows, self.wanted)
        ]
        assert error(self.cache.attend(*tokens[:3]), tokens[3]) <= 1e-11
        self.lengths = [n + many for n in self.lengths]

    @rule(order=st.tuples(st.integers(0, 1), st.integers(0, 1)))
    def reorder(self, order: tuple[int, int]) -> None:
        """Each sample goes on from what another has read."""
        self.cache.reorder(torch.tensor(order))
        self.lengths = [self.lengths[i] for i in order]
        self.sample = [self.sample[i] for i in order]

    @invariant()
    def lengths_agree(self) -> None:
        """The cache knows how far each sample is."""
        if hasattr(self, "cache"):
            assert self.cache.lengths == self.lengths


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=RUNS, stateful_step_count=20)
TestDecoding = Decoding.TestCase
TestDecoding.settings = settings(max_examples=3 * RUNS, stateful_step_count=12)
