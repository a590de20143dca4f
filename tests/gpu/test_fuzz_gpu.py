"""Random calls on every GPU backend, drawn from a seed: what a backend takes is what the dense oracle gives.

`DAP_FUZZ_EXAMPLES` says how many calls a backend is offered, `DAP_FUZZ_SEED` which.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from calls import SHARED, Menu, failures
from strategies import VIEWS

from dilated_attention_pytorch.kernels.call import AttentionCall, reproducible_gradients
from dilated_attention_pytorch.kernels.registry import explain
from dilated_attention_pytorch.patterns import Causal
from dilated_attention_pytorch.plan import make_plan

pytestmark = pytest.mark.gpu
# What other projects, and torch while it compiles, warn of is theirs to mend.
THEIRS = pytest.mark.filterwarnings("ignore")

EXAMPLES = int(os.environ.get("DAP_FUZZ_EXAMPLES", "40"))
SEED = os.environ.get("DAP_FUZZ_SEED", "0")

ANYTHING = Menu(
    longest=700,
    edges=(127, 128, 129, 255, 256, 257, 384, 511, 512, 513, 640),
    d=(19, 32, 64, 96, 128, 256),
    e=(24, 32, 64, 128),
    # Backends that copy nothing refuse rows off the grid, so those are rare. A block of 24 is no tile: it makes bits.
    layouts=("heads first", "tokens first", "rows apart", "width outside") * 3 + ("off the grid",),
    blocks=(16, 24, 64, 128),
    softcaps=(0.0, 0.0, 2.0),
)
PLAIN = replace(ANYTHING, padded=(False,), dropout=(0.0,), scales=(None, 0.05, 1.5), blocks=(24, 128), softcaps=(0.0,))
SIGNED = replace(PLAIN, scales=(None, -0.3, 0.0))
LISTS = replace(PLAIN, kinds=("causal", "window", "random", "block lists", "hierarchical"), leaves=2, blocks=(128,))


def alike(menu: Menu, d: int, e: int, dtype: torch.dtype, heads: int) -> Menu:
    """Calls that share kernels, which are compiled for each width, dtype and distance of rows."""
    return replace(menu, d=(d,), e=(e,), dtypes=(dtype,), heads=(heads,))


def wide(menu: Menu) -> list[Menu]:
    """The widths and dtypes of kernels made for one generation of GPUs."""
    classes = (64, torch.bfloat16, 4), (128, torch.bfloat16, 2), (64, torch.float16, 2), (128, torch.float16, 4)
    return [alike(menu, d, d, dtype, heads) for d, dtype, heads in classes]


MENUS = {
    "flex": [alike(LISTS, 64, 64, torch.bfloat16, 2), alike(LISTS, 128, 128, torch.float16, 4)],
    "triton": [
        alike(ANYTHING, 64, 64, torch.bfloat16, 4),
        alike(ANYTHING, 128, 128, torch.float16, 2),
        alike(ANYTHING, 96, 32, torch.float32, 2),
        alike(ANYTHING, 32, 24, torch.float16, 1),
        alike(ANYTHING, 19, 64, torch.bfloat16, 2),
        alike(ANYTHING, 256, 128, torch.bfloat16, 2),
    ],
    "auto": [ANYTHING, alike(PLAIN, 64, 64, torch.bfloat16, 2), alike(PLAIN, 128, 128, torch.float16, 2)],
    "hopper": [
        *wide(PLAIN),
        alike(SIGNED, 96, 40, torch.bfloat16, 2),
        alike(SIGNED, 32, 80, torch.float16, 4),
        alike(SIGNED, 32, 24, torch.bfloat16, 2),
    ],
    "flash4": wide(LISTS),
}
LOTS = [
    # Tracing and poisoned memory do not go together. Every call of these compiles for half a minute: begun first.
    *(pytest.param("flex", lot, marks=[pytest.mark.compile, THEIRS]) for lot in range(5)),
    *(pytest.param("flash4", lot, marks=THEIRS) for lot in range(8)),
    *((backend, lot) for backend in ("triton", "auto", "hopper") for lot in range(8)),
]


@pytest.fixture
def in_any_order() -> Iterator[None]:
    """Sums of gradients, without which FlashAttention-4 has none."""
    reproducible_gradients(False)
    yield
    reproducible_gradients(True)


def why_not(backend: str) -> str | None:
    """Why a backend cannot run anything here."""
    rows = torch.zeros(1, 1, 256, 64, dtype=torch.bfloat16, device="cuda")
    call = AttentionCall(rows, rows, rows, make_plan(Causal(), 256, 1, 128, "cuda"), 0.125)
    return explain(call).get(backend)


@pytest.mark.parametrize(("backend", "lot"), LOTS)
def test_what_a_backend_takes_is_what_the_oracle_gives(backend, lot, request):
    reason = why_not(backend)
    if reason is not None:
        pytest.skip(f"{backend} {reason}")
    if backend == "flash4":
        request.getfixturevalue("in_any_order")
    count = -(-EXAMPLES // (40 if backend == "flex" else 16 if backend == "auto" else 8))
    menus = MENUS[backend]
    ran, failed = failures(backend, menus[lot % len(menus)], count, f"{SEED} {backend} {lot}", "cuda")
    assert not failed, "\n".join(failed)
    assert ran == count


@pytest.mark.parametrize("lot", range(4))
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_any_layout_matches_oracle(backend, lot):
    reason = why_not(backend)
    if reason is not None:
        pytest.skip(f"{backend} {reason}")
    menu = replace(MENUS[backend][lot % len(MENUS[backend])], layouts=VIEWS, shared=SHARED)
    count = -(-EXAMPLES // 8)
    ran, failed = failures(backend, menu, count, f"{SEED} layouts {backend} {lot}", "cuda")
    assert not failed, "\n".join(failed)
    assert ran == count
