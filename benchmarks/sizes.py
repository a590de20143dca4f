"""Sizes and counts of the package that may only go down, kept in tests/sizes.json.

    make sizes

The file holds the smallest value reached so far: source lines of each room (a top-level folder of the package), of the
top-level modules together and of the whole package; modules in folders with more than 20; and counts of constructs that
are being removed. `make sizes` lowers the values and never raises one; a room that is not in the file yet is added.

A room may exceed its value when DESIGN.md has a line in its section "Size" that allows it and gives the reason:

    - kernels: 12,340 lines: a kernel for paged caches

tests/test_ratchets.py compares. Counts have no such exception. Standard library only.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "dilated_attention_pytorch"
PACKAGE = ROOT / "src" / NAME
FILE = ROOT / "tests" / "sizes.json"
CODE = (".py", ".cpp", ".h")
TOP, TOTAL = "top level", "total"
MODULES_A_FOLDER = 20
COLUMNS = 100
BACKENDS = {"native", "triton", "hopper", "flash4", "flex", "reference"}
"""Backend names as literals; "cpu" is left out, which is a device as well."""
BACKEND_ROOMS = {"kernels", "selection"}
ALLOWED = re.compile(r"^- ([\w ]+): ([\d,]+) lines: \S", re.MULTILINE)

Counts = dict[str, dict[str, int]]


def room_of(path: Path) -> str:
    """Top-level folder of a source file."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else TOP


def where(node: ast.AST, path: Path) -> str:
    """Place of a syntax node, as editors read it."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def lines() -> dict[str, int]:
    """Lines of code by room, and in total."""
    count: Counter[str] = Counter()
    for path in PACKAGE.rglob("*"):
        if path.suffix in CODE:
            size = len(path.read_text(encoding="utf-8").splitlines())
            count[room_of(path)] += size
            count[TOTAL] += size
    return dict(sorted(count.items()))


def modules() -> dict[str, int]:
    """Modules by folder, where there are more than `MODULES_A_FOLDER`."""
    folders = Counter(
        str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"
    )
    return {folder: count for folder, count in sorted(folders.items()) if count > MODULES_A_FOLDER}


def allowed() -> dict[str, int]:
    """Lines that DESIGN.md allows a room, by its section "Size"."""
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    section = re.search(r"^## Size\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return {room: int(size.replace(",", "")) for room, size in ALLOWED.findall(section.group(1) if section else "")}


class Sources:
    """Syntax trees of the package's modules by dotted name."""

    def __init__(self) -> None:
        self.paths = {self._dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}

    @staticmethod
    def _dotted(path: Path) -> str:
        parts = (NAME, *path.relative_to(PACKAGE).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imported(self, name: str) -> Iterator[tuple[ast.ImportFrom, str, ast.alias]]:
        """Statement, absolute module and name of each `from ... import ...`, wherever it is."""
        parts = name.split(".")
        package = parts if self.paths[name].name == "__init__.py" else parts[:-1]
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield node, module, alias

    def import_cycles(self) -> Iterator[str]:
        """Sets of modules that import each other, imports inside functions included; type checking alone excluded."""
        needs: dict[str, set[str]] = {name: set() for name in self.trees}
        for name, tree in self.trees.items():
            unused = {id(n) for node in ast.walk(tree) if _for_types(node) for n in ast.walk(node)}
            for node, module, alias in self.imported(name):
                target = f"{module}.{alias.name}" if f"{module}.{alias.name}" in self.trees else module
                # A package's own module list is not a dependency of its modules on each other.
                if id(node) not in unused and target in self.trees and target != name:
                    needs[name].add(target)
        for group in _circles(needs):
            yield " <-> ".join(sorted(name.removeprefix(f"{NAME}.") for name in group))

    def repeated_classes(self) -> Iterator[str]:
        """Class names defined in more than one module."""
        places = defaultdict(set)
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].add(name.removeprefix(f"{NAME}."))
        return (f"{name}: {', '.join(sorted(found))}" for name, found in sorted(places.items()) if len(found) > 1)

    def private_names(self) -> Iterator[str]:
        """Uses of a private name of another module, imported or as an attribute of an imported module."""
        for name, tree in self.trees.items():
            aliases = set()
            for node, module, alias in self.imported(name):
                if module.split(".")[0] != NAME:
                    continue
                if f"{module}.{alias.name}" in self.trees:
                    aliases.add(alias.asname or alias.name)
                elif _private(alias.name):
                    yield f"{where(node, self.paths[name])}: {alias.name} of {module}"
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and _private(node.attr) and ast.unparse(node.value) in aliases:
                    yield f"{where(node, self.paths[name])}: {ast.unparse(node)}"

    def backend_literals(self) -> Iterator[str]:
        """Backend names as string literals outside the rooms that hold backends."""
        for name, tree in self.trees.items():
            if room_of(self.paths[name]) not in BACKEND_ROOMS:
                for node in ast.walk(tree):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in BACKENDS:
                        yield f"{where(node, self.paths[name])}: {node.value!r}"

    def plan_keyed_dictionaries(self) -> Iterator[str]:
        """Weak dictionaries whose keys are plans."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Subscript) and ast.unparse(node).startswith("WeakKeyDictionary[Plan"):
                    yield where(node, self.paths[name])

    def caches(self) -> Iterator[str]:
        """Uses of `lru_cache` or `cache` of functools."""
        for name, tree in self.trees.items():
            cached = {alias.asname or alias.name for _, module, alias in self.imported(name) if module == "functools"}
            cached &= {"lru_cache", "cache"}
            for node in ast.walk(tree):
                named = isinstance(node, ast.Name) and node.id in cached
                dotted = isinstance(node, ast.Attribute) and ast.unparse(node) in (
                    "functools.lru_cache",
                    "functools.cache",
                )
                if named or dotted:
                    yield where(node, self.paths[name])


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _circles(needs: dict[str, set[str]]) -> Iterator[set[str]]:
    """Strongly connected components of more than one node."""
    reach = {name: set(found) for name, found in needs.items()}
    for middle in needs:
        for found in reach.values():
            if middle in found:
                found |= reach[middle]
    done: set[str] = set()
    for name in needs:
        if name not in done:
            group = {other for other in reach[name] if name in reach[other]}
            done |= group
            if len(group) > 1:
                yield group


def long_lines() -> Iterator[str]:
    """Lines of README, DESIGN and docs over `COLUMNS`, tables, code and lines of one link or picture aside."""
    for path in (ROOT / "README.md", ROOT / "DESIGN.md", *sorted((ROOT / "docs").rglob("*.md"))):
        code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            plain = not code and not line.startswith(("|", "<", "[", "!["))
            if plain and len(line) > COLUMNS and " " in line.strip("- "):
                yield f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"


def offences() -> dict[str, list[str]]:
    """Every occurrence of what is counted, by what it is."""
    sources = Sources()
    found: dict[str, Iterable[str]] = {
        "import cycles": sources.import_cycles(),
        "class names in two modules": sources.repeated_classes(),
        "private names of other modules": sources.private_names(),
        "backend names outside kernels and selection": sources.backend_literals(),
        "plan-keyed weak dictionaries": sources.plan_keyed_dictionaries(),
        "uses of lru_cache": sources.caches(),
        f"prose over {COLUMNS} columns": long_lines(),
    }
    return {what: list(places) for what, places in found.items()}


def measure() -> Counts:
    """Present values."""
    counts = {what: len(places) for what, places in offences().items()}
    return {"lines": lines(), "modules": modules(), "counts": counts}


def lowered(before: Counts, now: Counts) -> Counts:
    """The smaller of both values each. A name that is gone is dropped, one that came is added."""
    return {
        kind: {name: min(value, before.get(kind, {}).get(name, value)) for name, value in values.items()}
        for kind, values in now.items()
    }


def main() -> int:
    """Lower the values in the file; 1 where a present value is above its own."""
    before: Counts = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    now = measure()
    kept = lowered(before, now)
    FILE.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    room = allowed()
    above = [
        f"{name}: {value} {kind}, may be {kept[kind][name]}"
        for kind, values in now.items()
        for name, value in values.items()
        if value > max(kept[kind][name], room.get(name, 0) if kind == "lines" else 0)
    ]
    for line in above:
        print(line)
    if any(name in now["lines"] for name in (line.split(":")[0] for line in above)):
        print('give the reason in DESIGN.md, section "Size": - ROOM: LINES lines: REASON')
    return bool(above)


if __name__ == "__main__":
    raise SystemExit(main())
