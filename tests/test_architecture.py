"""The shape of the code base: imports between rooms, names, contents and the cost of an import."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import poisoned

import dilated_attention_pytorch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dilated_attention_pytorch"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NATIVE_SOURCES = sorted([*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")])

LEAVES = {"errors", "atomic_write", "shapes", "compat"}
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "atomic_write": set(),
    "shapes": set(),
    "compat": set(),
    "patterns": {"errors"},
    "plan": {"patterns"} | LEAVES,
    "kernels": {"plan"} | LEAVES,
    "ops": {"patterns", "plan", "kernels"} | LEAVES,
    "selection": {"patterns", "plan", "kernels", "ops"} | LEAVES,
    "distributed": {"patterns", "plan", "kernels", "ops", "selection"} | LEAVES,
    "nn": {"patterns", "plan", "ops", "selection", "distributed"} | LEAVES,
    "models": {"patterns", "ops", "nn"} | LEAVES,
    "integrations": {"patterns", "ops", "nn", "models"} | LEAVES,
}
"""room -> rooms it may mention. `tools` and the package itself may mention every public name."""
FREE = {"tools", "__init__", "__main__"}

TENSORS = {"torch", "numpy"}
OPTIONAL = {"triton", "matplotlib", "transformers", "jaxtyping"}

BANNED = ("v2", "new", "fixed", "improved", "optimized", "simple", "enhanced", "final", "true")

PUBLIC_NAMES = [
    "AdaptiveConfig",
    "Alibi",
    "AttentionOutput",
    "BackendUnsupported",
    "BlockColumns",
    "BlockDilated",
    "BlockLists",
    "BlockSparseAdaptive",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingDistributedDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseTorchSparse",
    "Causal",
    "Dilated",
    "DilatedAttention",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "DistillBatch",
    "DistributedSparseConfig",
    "Documents",
    "Full",
    "Global",
    "Grid",
    "Hierarchical",
    "HierarchicalConfig",
    "ImportanceScorer",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "KVCache",
    "LongNet",
    "LongNetConfig",
    "LongNetLM",
    "MultiheadBlockSparseAdaptive",
    "MultiheadDilatedAttention",
    "MultiheadSparseAttention",
    "Packed",
    "Pattern",
    "PerHead",
    "Plan",
    "PlanCache",
    "Position",
    "Random",
    "Replacement",
    "RingDilatedAttention",
    "RingMultiheadDilatedAttention",
    "Rotary",
    "Selection",
    "SequenceLayout",
    "SlideConfig",
    "SlideEncoder",
    "SlidingWindow",
    "SparseAttention",
    "SparsePatternConfig",
    "SparsifyReport",
    "StreamedLayer",
    "Strided",
    "Xpos",
    "attention",
    "attention_rows",
    "attention_step",
    "attention_with_lse",
    "backends",
    "context_parallel_attention",
    "context_parallel_attention_with_lse",
    "context_parallel_loss",
    "create_adaptive_block_sparse",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_block_sparse",
    "create_multihead_dilated_attention",
    "distance_bias",
    "explain",
    "fit_scorers",
    "get_block_sparse_preset",
    "integrate",
    "make_plan",
    "make_selection",
    "merge",
    "parse",
    "plan_cache",
    "register_pattern",
    "replace_attention",
    "reproducible_gradients",
    "scorer_parameters",
    "select_blocks",
    "selected_attention",
    "shard_sequence",
    "sparsify",
    "streamed_attention",
    "t5_bias",
    "task_parameters",
    "unshard_sequence",
    "validate_cu_seqlens",
    "validate_indices",
    "varlen_attention",
]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Absolute dotted module, names taken from it, line: of each import statement wherever it stands."""
    package = ("dilated_attention_pytorch", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, (), node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            yield module, tuple(alias.name for alias in node.names), node.lineno


def rooms_mentioned(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Rooms of this library named by the imports of a file."""
    for module, names, line in imports(path):
        head, *rest = module.split(".")
        if head != "dilated_attention_pytorch":
            continue
        if rest:
            yield rest[0], names, line
        else:
            for name in names:
                yield name, (), line


def where(path: Path, line: int | None = None) -> str:
    place = str(path.relative_to(ROOT))
    return place if line is None else f"{place}:{line}"


def test_imports_follow_the_arrows():
    wrong = [
        f"{where(path, line)}: {room_of(path)} may not import {room}"
        for path in SOURCES
        if room_of(path) not in FREE
        for room, _, line in rooms_mentioned(path)
        if room != room_of(path) and room not in ARROWS[room_of(path)]
    ]
    assert wrong == []


def test_every_room_has_its_arrows():
    assert {room_of(path) for path in SOURCES} - set(ARROWS) - FREE == set()


def test_the_arrows_have_no_circle():
    placed: set[str] = set()
    while len(placed) < len(ARROWS):
        ready = {room for room, needs in ARROWS.items() if room not in placed and needs <= placed}
        assert ready, f"rooms in a circle: {sorted(set(ARROWS) - placed)}"
        placed |= ready


def test_no_room_takes_private_names_of_another():
    wrong = [
        f"{where(path, line)}: {name} is private to {room}"
        for path in SOURCES
        for room, names, line in rooms_mentioned(path)
        if room != room_of(path)
        for name in names
        if name.startswith("_")
    ]
    assert wrong == []


def test_patterns_know_no_tensors():
    wrong = [
        f"{where(path, line)}: imports {module}"
        for path in SOURCES
        if room_of(path) == "patterns"
        for module, _, line in imports(path)
        if module.split(".")[0] in TENSORS
    ]
    assert wrong == []


def test_only_ops_and_above_know_modules_and_process_groups():
    below = {"patterns", "plan", "kernels", "ops"}
    wrong = [
        f"{where(path, line)}: imports {module}"
        for path in SOURCES
        if room_of(path) in below
        for module, names, line in imports(path)
        if module.startswith(("torch.nn.modules", "torch.distributed"))
        or (module == "torch" and {"nn", "distributed"} & set(names))
    ]
    assert wrong == []


def words(name: str) -> set[str]:
    """Lower-case words of a snake_case or CamelCase name."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return set(snake.lower().split("_"))


def test_names_say_what_and_not_which_attempt():
    wrong = []
    for path in SOURCES + sorted((ROOT / "tests").rglob("*.py")):
        if path == PACKAGE / "compat.py":
            continue
        names = [path.stem]
        names += [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        wrong += [f"{where(path)}: {name}" for name in names if words(name) & set(BANNED)]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "banned"),
    [("ring_v2", True), ("AttentionV2", True), ("BlockSparseOptimized", True), ("newest", False), ("Window", False)],
)
def test_the_banned_words_are_recognised(name: str, banned: bool):
    assert bool(words(name) & set(BANNED)) is banned


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a path of one machine", r"(?<![\w.<~])/(home|work|root|tmp|Users|opt|mnt)/\w"),
        ("an unfinished note", r"\b(TODO|FIXME|XXX|HACK)\b"),
        ("a date", r"\b20\d\d-\d\d-\d\d\b"),
        ("a banner", r"[#/]\s*[=\-*#]{8,}"),
    ],
)
def test_sources_do_not_contain(what: str, pattern: str):
    wrong = [
        f"{where(path, number)}: {line.strip()}"
        for path in SOURCES + NATIVE_SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert wrong == [], f"found {what}"


def test_names_of_tests_are_at_most_60_characters():
    names = (
        name for path in Path(__file__).parent.rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    )
    assert [name for name in names if len(name) > 60] == []


def test_public_names_are_these():
    assert sorted(dilated_attention_pytorch.__all__) == sorted(PUBLIC_NAMES)


def test_type_checkers_see_the_same_names_in_the_same_modules():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {a.asname: i.module for i in imports for a in i.names} == dilated_attention_pytorch._MODULES


def test_public_names_exist_and_are_documented():
    found = {name: getattr(dilated_attention_pytorch, name) for name in dilated_attention_pytorch.__all__}
    assert [name for name, value in found.items() if not value.__doc__] == []
    assert [name for name, value in found.items() if isinstance(value, ModuleType)] == []


def test_importing_the_library_loads_no_optional_package():
    code = "import sys, json, dilated_attention_pytorch; print(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    loaded = {name.split(".")[0] for name in json.loads(result.stdout)}
    assert "dilated_attention_pytorch" in loaded
    assert loaded & OPTIONAL == set()


@pytest.mark.parametrize(
    "call",
    [
        "torch.empty(8)",
        "torch.empty_like(torch.zeros(8))",
        "torch.empty_strided((4, 2), (2, 1))",
        "torch.zeros(1).new_empty(8)",
        "torch.zeros(1).new_empty_strided((4, 2), (2, 1))",
    ],
)
def test_memory_the_library_asks_for_is_poisoned(call: str):
    assert eval(call, {"__name__": "dilated_attention_pytorch.kernels.probe", "torch": torch}).isnan().all()


def test_memory_of_others_is_left_alone():
    assert poisoned(torch.zeros)(8).eq(0).all()
    namespace = {"__name__": "dilated_attention_pytorch", "zeros": poisoned(torch.zeros), "torch": torch}
    assert eval("zeros(8)", namespace).isnan().all()
    assert eval("zeros(8, dtype=torch.int64)", namespace).gt(2**62).all()
    assert not eval("zeros(8, dtype=torch.bool)", namespace).any()
