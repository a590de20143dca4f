"""Patterns as text, for command lines, logs and cache keys: `dilated:2048x1,8192x4 & causal`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..errors import must, must_be
from .blocks import BlockDilated, BlockLists, Hierarchical, Random
from .dilated import Dilated, Strided
from .local import Causal, Documents, Full, Global, SlidingWindow
from .packed import Packed
from .pattern import And, Or, Pattern, PerHead

EXAMPLES = {
    "full": "full",
    "causal": "causal",
    "window": "window:512 or window:512,0",
    "global": "global:64 or global:64;queries=1",
    "documents": "documents:100,28",
    "dilated": "dilated:2048x1,8192x4;offset=block",
    "strided": "strided:16 or strided:4;block=128",
    "random": "random:0.1;block=128;seed=0;per_head=1",
    "hierarchical": "hierarchical:4x1,16x4,0x16;block=128",
    "block_dilated": "block_dilated:2048x1,8192x4;sparsity_ratio=0.1;block=128",
    "blocks": "blocks:0,0 1,1 2;block=128",
    "heads": "heads{window:4 / causal}",
    "packed": "packed{causal / documents:100,28}",
}
"""Every name `parse` knows, with an example."""
DEEPEST = 128
"""Patterns inside one another; what walks a pattern recurses a few times for each."""


@lru_cache(maxsize=512)
def parse(text: str) -> Pattern:
    """Read a pattern: names joined by `&` and `|` (`&` binds tighter), grouped by parentheses.

    >>> parse("dilated:2048x1,8192x4 & causal")
    dilated:2048x1,8192x4 & causal
    """
    reader = _Reader(text)
    try:
        pattern = reader.union()
    except RecursionError:
        raise reader.error(f"at most {DEEPEST} patterns inside one another") from None
    if reader.peek():
        raise reader.error(f"an operator or the end, before {reader.peek()!r}")
    if _depth(pattern) > DEEPEST:
        raise reader.error(f"at most {DEEPEST} patterns inside one another")
    return pattern


def as_pattern(pattern: Pattern | str) -> Pattern:
    """A pattern from its text, or itself."""
    if isinstance(pattern, str):
        return parse(pattern)
    if not isinstance(pattern, Pattern):
        raise must_be("pattern must be a Pattern or text", type(pattern).__name__, 'For example "window:512 & causal".')
    return pattern


def _depth(pattern: Pattern) -> int:
    """How many patterns lie inside one another, found without recursion."""
    depth, level = 0, [pattern]
    while level and depth <= DEEPEST:
        depth += 1
        level = [inner for outer in level for inner in _inside(outer)]
    return depth


def _inside(pattern: Pattern) -> tuple[Pattern, ...]:
    match pattern:
        case And() | Or():
            return pattern.left, pattern.right
        case PerHead():
            return pattern.patterns
        case Packed():
            return (pattern.pattern,)
        case _:
            return ()


class _Reader:
    """Recursive descent over the tokens; one method a level of binding."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [t.strip() for t in re.findall(r"[()&|/{}]|[^()&|/{}]+", text) if t.strip()]
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if expected is not None and token != expected:
            raise self.error(repr(expected))
        self.at += 1
        return token

    def error(self, expected: str) -> ValueError:
        return must(
            f"pattern text must have {expected} here", _shown(self.text), f"Known: {', '.join(EXAMPLES.values())}"
        )

    def union(self) -> Pattern:
        pattern = self.intersection()
        while self.peek() == "|":
            self.take()
            pattern = pattern | self.intersection()
        return pattern

    def intersection(self) -> Pattern:
        pattern = self.atom()
        while self.peek() == "&":
            self.take()
            pattern = pattern & self.atom()
        return pattern

    def atom(self) -> Pattern:
        token = self.take()
        if token == "(":
            pattern = self.union()
            self.take(")")
            return pattern
        if token == "heads":
            return PerHead(tuple(self.braces()))
        if token == "packed":
            return self.packed()
        head, *tail = token.split(";")
        name, _, body = (part.strip() for part in head.partition(":"))
        if name not in _MAKERS:
            raise self.error("a pattern name")
        pairs = [part.partition("=") for part in tail]
        try:
            return _MAKERS[name](body, {key.strip(): _value(value.strip()) for key, _, value in pairs})
        except (TypeError, IndexError, KeyError):
            raise self.error(f"arguments like {EXAMPLES[name]!r}") from None
        except ValueError as error:
            if "must" in str(error):
                raise
            raise self.error(f"arguments like {EXAMPLES[name]!r}") from None

    def braces(self) -> list[Pattern]:
        self.take("{")
        patterns = [self.union()]
        while self.peek() == "/":
            self.take()
            patterns.append(self.union())
        self.take("}")
        return patterns

    def packed(self) -> Pattern:
        self.take("{")
        pattern = self.union()
        self.take("/")
        lengths, *tail = self.take().split(";")
        if not lengths.startswith("documents:"):
            raise self.error("documents:...")
        self.take("}")
        keywords = {key: int(value) for key, _, value in (part.partition("=") for part in tail)}
        return Packed(pattern, _numbers(lengths.removeprefix("documents:")), **keywords)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 500 else f"{text[:250]!r} ... {text[-100:]!r}"


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _numbers(body: str) -> tuple[int, ...]:
    return tuple(int(part) for part in body.split(","))


def _pairs(body: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pairs = [part.split("x") for part in body.split(",")]
    return tuple(int(pair[0]) for pair in pairs), tuple(int(pair[1]) for pair in pairs)


def _nothing(kind: Callable[[], Pattern]) -> Callable[[str, dict[str, Any]], Pattern]:
    def make(body: str, keywords: dict[str, Any]) -> Pattern:
        if body:
            raise ValueError(body)
        return kind(**keywords)

    return make


def _block_lists(body: str, keywords: dict[str, Any]) -> Pattern:
    if body.startswith("@"):
        lists = BlockLists.known(body[1:])
    else:
        heads = keywords.pop("heads", 1)
        rows = [[] if row.strip() == "-" else [int(j) for j in row.split()] for row in body.split(",")]
        each = len(rows) // heads
        by_head = [rows[h * each : (h + 1) * each] for h in range(heads)]
        lists = BlockLists.of(by_head if heads > 1 else rows, keywords.pop("block", 128))
    length = keywords.pop("length", None)
    if keywords:
        raise TypeError(keywords)
    return lists if length is None else lists.resolve(length, lists.heads)


_MAKERS: dict[str, Callable[[str, dict[str, Any]], Pattern]] = {
    "full": _nothing(Full),
    "causal": _nothing(Causal),
    "window": lambda body, keywords: SlidingWindow(*_numbers(body), **keywords),
    "global": lambda body, keywords: Global(int(body), **keywords),
    "documents": lambda body, keywords: Documents(_numbers(body), **keywords),
    "dilated": lambda body, keywords: Dilated(*_pairs(body), **keywords),
    "strided": lambda body, keywords: Strided(int(body), **keywords),
    "random": lambda body, keywords: Random(float(body), **keywords),
    "hierarchical": lambda body, keywords: Hierarchical(tuple(zip(*_pairs(body), strict=True)), **keywords),  # type: ignore
    "block_dilated": lambda body, keywords: BlockDilated(*_pairs(body), **keywords),
    "blocks": _block_lists,
}
