"""Patterns of one's own: registered classes, masks, functions, equality by value, and messages that lead there."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from oracle import answer, error
from own_patterns import HeadResidues, Table
from torch.nn.attention.flex_attention import and_masks, or_masks

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.patterns import base
from dilated_attention_pytorch.patterns.functions import MaskMod
from dilated_attention_pytorch.patterns.parse import is_writable, to_operand
from dilated_attention_pytorch.plan import closed_forms

N = 70


@pytest.fixture
def rows() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(3, 1, 2, N, 8, dtype=torch.float64).unbind()


@pytest.fixture(autouse=True)
def own_names() -> Iterator[None]:
    """Forget classes that a test registers."""
    yield
    module = sys.modules["dilated_attention_pytorch.patterns.parse"]
    for kind, name in list(base.REGISTERED.items()):
        for table in (module.EXAMPLES, module._OPTIONS, module._MAKERS):
            table.pop(name)
        base.REGISTERED.pop(kind)
    dap.parse.cache_clear()


def registered(**options: Any) -> type[dap.Pattern]:
    @dap.register_pattern("stripes")
    @dataclass(frozen=True, **options)
    class Stripes(dap.Pattern):
        width: int
        shift: int = 0
        axes: tuple[int, ...] = (1,)
        name: str = "plain"
        share: float = 0.5
        wide: bool = False

        def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
            return (q - k - self.shift) % self.width == 0

    return Stripes


@pytest.mark.parametrize("slots", [False, True])
def test_registered_text_comes_back_equal(slots: bool):
    kind = registered(slots=slots)
    pattern = kind(3, shift=-2, axes=(2, 3), name="other", share=0.25, wide=True)
    assert str(pattern) == "stripes:3;shift=-2;axes=2x3;name=other;share=0.25;wide=true"
    assert dap.parse(f"{pattern} & causal") == pattern & dap.Causal()
    assert dap.parse(str(kind(3, axes=(4,)))) == kind(3, axes=(4,))
    assert to_operand(kind(5) | dap.Causal()) == "stripes:5 | causal"


@pytest.mark.parametrize(
    "values", [{"name": "a b"}, {"name": "12"}, {"axes": ()}, {"share": float("nan")}, {"axes": None}]
)
def test_values_without_text_travel_by_handle(values: dict[str, Any], rows):
    pattern = registered()(3, **values)
    assert not is_writable(pattern) and to_operand(pattern).startswith("@")
    assert error(dap.attention(*rows, pattern), answer(*rows, pattern).output) <= 1e-12


def test_registering_again_replaces_the_class(rows):
    def define(sign: int) -> type[dap.Pattern]:
        @dap.register_pattern("stripes")
        @dataclass(frozen=True)
        class Stripes(dap.Pattern):
            width: int

            def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
                return (q + sign * k) % self.width == 0

        return Stripes

    for sign in (-1, 1):
        kind = define(sign)
        assert type(dap.parse("stripes:3")) is kind
        assert error(dap.attention(*rows, "stripes:3"), answer(*rows, kind(3)).output) <= 1e-12


def test_registration_checks_name_and_class():
    @dataclass
    class Mutable(dap.Pattern):
        width: int

    @dataclass(frozen=True)
    class Described(dap.Pattern):
        def describe(self) -> str:
            return "mine"

    registered()
    for name, kind, raised, message in (
        ("window", HeadResidues, ValueError, "must be free, got 'window'"),
        ("stripes", HeadResidues, ValueError, "must be free, got 'stripes', which is"),
        ("a b", HeadResidues, ValueError, "must be letters, digits"),
        ("mine", Mutable, TypeError, r"must be a frozen dataclass[^$]*Add @dataclass\(frozen=True\)"),
        ("mine", Described, TypeError, "must not define describe"),
        ("mine", int, TypeError, "must decorate a subclass of Pattern"),
    ):
        with pytest.raises(raised, match=message):
            dap.register_pattern(name)(kind)
    with pytest.raises(ValueError, match="must be written like stripes:width;shift="):
        dap.parse("stripes:1,2")
    with pytest.raises(ValueError, match="shift of stripes must be a number"):
        dap.parse("stripes:1;shift=?")


@pytest.fixture
def compiler() -> Iterator[None]:
    with warnings.catch_warnings():
        # Dynamo instantiates autograd.Function itself and is warned about it.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
        warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
        torch._dynamo.reset()
        yield


@pytest.mark.compile
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["frozen", "plain", "registered", "function", "lists", "composite"])
def test_compiles_as_one_graph(name: str, rows):
    mask = torch.rand(N, N, generator=torch.Generator().manual_seed(1)) < 0.9
    pattern = {
        "frozen": HeadResidues(5),
        "plain": Table(*(t % 3 for t in range(N))),
        "registered": registered()(3),
        "function": dap.Pattern.from_mask_mod(lambda b, h, q, k: (q + k) % (h + 2) == 0),
        "lists": dap.Pattern.from_mask(mask),
        "composite": HeadResidues(7) & dap.SlidingWindow(20) | registered()(5),
    }[name]
    holder = torch.nn.Module()
    holder.pattern = pattern

    def call(query: torch.Tensor) -> torch.Tensor:
        return dap.attention(query, *rows[1:], holder.pattern, is_causal=True).sin().sum()

    query = rows[0].clone().requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    wanted, got = (torch.autograd.grad(run(query), query)[0] for run in (call, compiled))
    assert error(got, wanted) <= 1e-12
    holder.pattern = dap.Pattern.from_mask_mod(lambda b, h, q, k: q - k < 9)
    assert error(compiled(query), call(query)) <= 1e-12


@pytest.mark.compile
@pytest.mark.usefixtures("compiler")
def test_patterns_made_in_a_compiled_call_keep_their_values(rows):
    def call(query: torch.Tensor) -> torch.Tensor:
        return dap.attention(query, *rows[1:], HeadResidues(5))

    assert error(torch.compile(call, backend="aot_eager")(rows[0]), call(rows[0])) <= 1e-12


def test_registered_patterns_are_exported(rows, tmp_path):
    class Model(torch.nn.Module):
        pattern = registered()(3)

        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return dap.attention(query, query, query, self.pattern)

    program = torch.export.export(Model(), (rows[0],))
    assert "stripes:3" in str(program.graph)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert error(loaded(rows[0]), Model()(rows[0])) <= 1e-12


@pytest.mark.parametrize("shape", ["two", "heads", "sample"])
def test_masks_become_patterns(shape: str, rows):
    mask = torch.rand(2, N, N, generator=torch.Generator().manual_seed(1)) < 0.3
    mask = {"two": mask[0], "heads": mask, "sample": mask[None]}[shape]
    wanted = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask)
    pattern = dap.Pattern.from_mask(mask)
    assert pattern.block == 1 and pattern.heads == (1 if shape == "two" else 2)
    assert error(dap.attention(*rows, pattern), wanted) <= 1e-12


@pytest.mark.parametrize(("n", "block"), [(256, 64), (200, 16), (130, 128), (250, 1), (1, 128)])
def test_uniform_blocks_of_a_mask_are_listed(n: int, block: int):
    side = -(-n // block)
    cells = torch.rand(side, side, generator=torch.Generator().manual_seed(n)) < 0.5
    mask = cells.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :n]
    pattern = dap.Pattern.from_mask(mask)
    assert pattern.block == block
    assert torch.equal(dap.make_plan(pattern, n, 1).to_dense()[0].bool(), mask)


def test_equal_heads_of_a_mask_share_lists():
    mask = torch.ones(3, 40, 40, dtype=torch.bool).tril()
    assert dap.Pattern.from_mask(mask) == dap.Pattern.from_mask(mask[0])


@pytest.mark.parametrize(
    ("mask", "raised", "message"),
    [
        ([[True]], TypeError, "must be a bool Tensor, got list"),
        (
            torch.zeros(4, 4),
            TypeError,
            "must be bool, True where a query attends, got torch.float32\nFor an additive mask",
        ),
        (torch.ones(4, 5, dtype=torch.bool), ValueError, r"must have shape \(n, n\)"),
        (torch.ones(2, 1, 4, 4, dtype=torch.bool), ValueError, "A plan holds for every sample"),
        (torch.ones(0, 0, dtype=torch.bool), ValueError, "must have shape"),
    ],
)
def test_wrong_masks_are_refused(mask: torch.Tensor, raised: type[Exception], message: str):
    with pytest.raises(raised, match=message):
        dap.Pattern.from_mask(mask)


def test_planning_a_mask_evaluates_kept_tiles_alone(monkeypatch: pytest.MonkeyPatch):
    token, side = torch.arange(48 * 48), 48
    near = ((token // side)[:, None] - token // side).abs() <= 2
    mask = near & (((token % side)[:, None] - token % side).abs() <= 2)
    evaluated, form, count = [], closed_forms.BlockForm, closed_forms.BlockForm.count
    monkeypatch.setattr(form, "count", lambda self, q, *rest: evaluated.append(len(q)) or count(self, q, *rest))
    plan = dap.make_plan(dap.Pattern.from_mask(mask), len(token), 1)
    assert sum(evaluated) == plan.blocks < 18**2


def test_mask_mods_match_flex_attention(rows):
    table = torch.arange(N) // 9

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def document(b, h, q_idx, kv_idx):
        return table[q_idx] == table[kv_idx]

    def by_head(b, h, q_idx, kv_idx):
        return torch.where(h == 0, kv_idx < 5, (q_idx - kv_idx) % 2 == 0)

    mask_mod = or_masks(and_masks(causal, document), by_head)
    index = torch.arange(N)
    mask = torch.stack([mask_mod(torch.zeros(()), torch.tensor(h), index[:, None], index) for h in range(2)])
    wanted = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask)
    assert error(dap.attention(*rows, dap.Pattern.from_mask_mod(mask_mod)), wanted) <= 1e-12


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: (q >= k) & (b == 0),
        lambda b, h, q, k: torch.arange(3)[b] + q >= k,
        lambda b, h, q, k: q >= k + 2 * b,
        lambda b, h, q, k: torch.where(b > 0, q, k) > 0,
        lambda b, h, q, k: torch.add(q, b) > k,
    ],
)
def test_mask_mods_that_read_the_sample_are_refused(mask_mod, rows):
    with pytest.raises(TypeError, match=r"must not depend on the batch index b[^$]*key_padding_mask"):
        dap.attention(*rows, dap.Pattern.from_mask_mod(mask_mod))


def test_score_mods_are_refused(rows):
    with pytest.raises(TypeError, match=r"mask_mod must return a bool tensor, got torch.int64"):
        dap.attention(*rows, dap.Pattern.from_mask_mod(lambda b, h, q, k: q - k))
    with pytest.raises(TypeError, match="mask_mod must be a function"):
        dap.Pattern.from_mask_mod("causal")
    with pytest.raises(TypeError, match=r"function of \(b, h, q_idx, kv_idx\), got <lambda>\(q, k\)"):
        dap.Pattern.from_mask_mod(lambda q, k: q >= k)


def test_functions_are_equal_by_code_and_captured_values():
    def window(width, table=None):
        return MaskMod(lambda b, h, q, k: (q - k < width) & (table is None))

    first, second = torch.zeros(3), torch.zeros(3)
    assert window(3) == window(3) and hash(window(3)) == hash(window(3))
    assert window(3) != window(4) and window(1) != window(True)
    assert window([1, 2]) == window([1, 2]) != window([1, 3])
    assert window(3, first) == window(3, first) != window(3, second)
    before = window(3, first)
    first += 1
    assert before != window(3, first)
    assert MaskMod(lambda b, h, q, k: q > k) != MaskMod(lambda b, h, q, k: q < k)


class Reader:
    """Mask functions that reach their ids in different ways; the ids change between calls."""

    ids: Any = None

    def method(self, b, h, q, k):
        return self.ids[q] == self.ids[k]

    def __call__(self, b, h, q, k):
        return self.ids[q] == self.ids[k]


IDS: Any = None
READER = Reader()
CALLABLE = Reader()


def reads_global(b, h, q, k):
    return IDS[q] == IDS[k]


def reads_inside(b, h, q, k):
    at = lambda token: IDS[token]  # noqa: E731
    return at(q) == at(k)


def reads_attribute(b, h, q, k):
    return READER.ids[q] == READER.ids[k]


WAYS = {
    "global": reads_global,
    "inner function": reads_inside,
    "attribute": reads_attribute,
    "method": READER.method,
    "object": CALLABLE,
    "partial": partial(reads_global, h=0),
}


@pytest.mark.parametrize("way", WAYS)
def test_functions_of_new_captured_values_differ(way: str):
    earlier: list[MaskMod] = []
    for step in range(30):
        # A tensor may take the address of one that was freed here.
        globals()["IDS"] = READER.ids = CALLABLE.ids = torch.arange(20) // (step + 1)
        pattern = MaskMod(WAYS[way])
        assert pattern == MaskMod(WAYS[way]) and pattern not in earlier
        earlier.append(pattern)
    globals()["IDS"] = READER.ids = CALLABLE.ids = None
    assert all(one != other for one, other in pairwise(earlier))


def test_captured_arrays_are_equal_by_contents():
    ids = np.arange(6)

    def pattern() -> MaskMod:
        return MaskMod(lambda b, h, q, k: q + int(ids[0]) >= k)

    before = pattern()
    assert before == pattern()
    ids[0] = 9
    assert before != pattern()


def test_patterns_of_functions_are_pickled():
    pattern = MaskMod(reads_attribute)
    module = pickle.loads(pickle.dumps(dap.SparseAttention(pattern & dap.Causal())))
    assert module.pattern == pattern & dap.Causal() and copy.deepcopy(pattern) == pattern


def test_a_function_that_names_itself_has_a_key():
    def outer(b, h, q, k):
        return outer is not None and q >= k

    assert MaskMod(outer) == MaskMod(outer)


def test_plans_of_equal_functions_are_shared(rows):
    def pattern() -> dap.Pattern:
        return dap.Pattern.from_mask_mod(lambda b, h, q, k: (q * k) % 7 < 3)

    dap.attention(*rows, pattern())
    misses = dap.plan_cache.info().misses
    dap.attention(*rows, pattern())
    assert dap.plan_cache.info().misses == misses


def test_plain_classes_are_equal_by_attributes():
    assert Table(1, 2) == Table(1, 2) != Table(1, 3)
    assert hash(Table(1, 2)) == hash(Table(1, 2))


def test_mutable_dataclasses_are_refused(rows):
    @dataclass
    class Mutable(dap.Pattern):
        width: int

        def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
            return q - k < self.width

    with pytest.raises(TypeError, match=r"Mutable must be hashable[^$]*@dataclass\(frozen=True\)"):
        dap.attention(*rows, Mutable(3))


@dataclass(frozen=True)
class Diagonals(dap.Pattern):
    """Keys at some distances back, with bounds that planning may use."""

    distances: tuple[int, ...]

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return sum((q - k == distance) * 1 for distance in self.distances) > 0

    def key_range(self, first: Any, last: Any, head: int = 0) -> tuple[Any, Any]:
        return first - max(self.distances), last - min(self.distances)


def test_key_range_bounds_planning(monkeypatch: pytest.MonkeyPatch, rows):
    pattern, evaluated, allows = Diagonals((0, 3, 40)), [], Diagonals.allows
    assert error(dap.attention(*rows, pattern), answer(*rows, pattern).output) <= 1e-12
    monkeypatch.setattr(Diagonals, "allows", lambda self, q, k, h=0: evaluated.append(len(q)) or allows(self, q, k, h))
    plan = dap.make_plan(pattern, 128 * 40, 1)
    assert plan.blocks == 79 and sum(evaluated) == 79


@pytest.mark.parametrize("use", [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a])
def test_truth_values_of_patterns_are_refused(use):
    with pytest.raises(
        TypeError, match="window:8\nPython's `and`, `or` and `not` drop one side; combine patterns with &"
    ):
        use(dap.SlidingWindow(8), dap.Causal())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "windw:64",
            "pattern name must be known, got 'windw' in 'windw:64'\nDid you mean 'window'? Example: window:512",
        ),
        ("Causal", "Did you mean 'causal'?"),
        ("window:64 & casual", "Did you mean 'causal'?"),
        ("dilate:64x1", "Did you mean 'dilated'?"),
        ("local:64", "Did you mean 'window'?"),
        ("nothing:1", "a pattern name must be known, got 'nothing' in 'nothing:1'\nKnown: full, causal, window:512"),
        ("window:64 causal", "window must be written like window:512 or window:512,0, got 'window:64 causal'"),
        (
            "window:64 or causal",
            "patterns must be joined by & and |, got 'window:64 or causal'\nWrite 'window:64 | causal'.",
        ),
        (
            "causal & dilated:64,256x4",
            "dilated must be written like dilated:2048x1,8192x4;offset=block, got 'dilated:64,256x4'\n"
            "It is part of 'causal & dilated:64,256x4'.",
        ),
    ],
)
def test_unknown_names_lead_to_close_ones(text: str, message: str):
    with pytest.raises(ValueError) as raised:
        dap.parse(text)
    assert message in str(raised.value)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(4, 4, dtype=torch.bool), r"got Tensor\nPattern.from_mask\(mask\)"),
        (lambda b, h, q, k: q >= k, r"got function\nPattern.from_mask_mod\(f\)"),
        (dap.Causal, "got the class Causal\nPass an instance"),
        (3, 'got int\nFor example "window:512'),
        (None, 'pattern must be given, got none\nDense attention is "full"'),
    ],
)
def test_other_types_lead_to_a_pattern(value: Any, message: str, rows):
    for call in (dap.attention, dap.attention_with_lse):
        with pytest.raises(TypeError, match=message):
            call(*rows, *([] if value is None else [value]))


def test_describing_a_function_is_the_same_in_every_process():
    code = "from dilated_attention_pytorch import Pattern\nprint(Pattern.from_mask_mod(lambda b, h, q, k: q >= k))"
    texts = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in "ab"
    }
    assert len(texts) == 1 and "mask_mod(<lambda>@" in texts.pop()
