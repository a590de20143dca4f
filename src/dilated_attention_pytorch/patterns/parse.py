"""Patterns as text, for command lines, logs and cache keys: `dilated:2048x1,8192x4 & causal`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import count
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..errors import must, must_be
from .base import REGISTERED, And, Or, Pattern, PerHead, integer, literal, registered_text, text_fields
from .blocks import BlockColumns, BlockDilated, BlockLists, Hierarchical, Random
from .dilated import Dilated, Strided
from .grid import Grid
from .packed import Packed
from .positions import Causal, Documents, Full, Global, SlidingWindow

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
    "block_columns": "block_columns:16;block=128",
    "blocks": "blocks:0,0 1,1 2;block=128",
    "grid": "grid:32x32;window=7x7 or grid:8x32x32;window=3x7x7;causal=1x0x0",
    "heads": "heads{window:4 / causal}",
    "packed": "packed{causal / documents:100,28}",
}
"""Names that `parse` reads, with an example of each."""
OTHER_NAMES = {
    "local": "window",
    "sliding": "window",
    "sliding_window": "window",
    "longnet": "dilated",
    "neighborhood": "grid",
    "dense": "full",
}
"""Names of the literature -> names in pattern text, for errors."""
DEEPEST = 128
"""Most patterns inside one another; functions over patterns recurse a few times for each level."""
PatternClass = TypeVar("PatternClass", bound=type[Pattern])


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
        raise reader.too_deep() from None
    if reader.peek():
        raise reader.error("& or |")
    if _depth(pattern) > DEEPEST:
        raise reader.too_deep()
    return pattern


def as_pattern(pattern: Pattern | str) -> Pattern:
    """A pattern from its text, or itself."""
    if isinstance(pattern, str):
        return parse(pattern)
    if not isinstance(pattern, Pattern):
        raise not_a_pattern(pattern)
    return pattern


def not_a_pattern(value: Any) -> TypeError:
    """Error for an argument `pattern` of the wrong type, with the way from that type to a pattern."""
    if value is None:
        return must_be("pattern must be given", "none", 'Dense attention is "full"; another is "window:512 & causal".')
    advice = 'For example "window:512 & causal".'
    if isinstance(value, type) and issubclass(value, Pattern):
        return must_be("pattern must be a Pattern or text", f"the class {value.__name__}", "Pass an instance of it.")
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        advice = "Pattern.from_mask(mask) makes a pattern of a bool mask, True where a query attends."
    elif callable(value):
        advice = "Pattern.from_mask_mod(f) makes a pattern of f(b, h, q_idx, kv_idx)."
    return must_be("pattern must be a Pattern or text", type(value).__name__, advice)


def register_pattern(name: str) -> Callable[[PatternClass], PatternClass]:
    """Class decorator that gives a custom pattern a name in pattern text.

    The class is a frozen dataclass. Fields without default are written after the colon in their order, fields with
    a default as options; values are numbers, flags (`true`), words, and tuples of integers (`2x3`). A registered
    pattern is read by `parse` and the `dap` command and can be exported; the process that loads an exported program
    registers the class first. Registering a name again replaces a class of the same name.

    >>> from dataclasses import dataclass
    >>> @register_pattern("every")
    ... @dataclass(frozen=True)
    ... class Every(Pattern):
    ...     step: int
    ...     shift: int = 0
    ...     def allows(self, q, k, head=0):
    ...         return (q - k - self.shift) % self.step == 0
    >>> parse("every:3;shift=1 & causal").left == Every(3, shift=1)
    True
    """
    if not isinstance(name, str):
        raise must_be("register_pattern must have a name", repr(name), 'Write @register_pattern("name") above a class.')
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise must("a pattern name must be letters, digits and underscores", repr(name))

    def register(cls: PatternClass) -> PatternClass:
        if not (isinstance(cls, type) and issubclass(cls, Pattern)):
            raise must_be("register_pattern must decorate a subclass of Pattern", repr(cls))
        if not is_dataclass(cls) or cls.__hash__ is None:
            raise must_be(f"{cls.__name__} must be a frozen dataclass", "another class", "Add @dataclass(frozen=True).")
        if cls.describe is not Pattern.describe:
            raise must_be(f"{cls.__name__} must not define describe", "its own", "Registration defines the text.")
        holder = next((kind for kind, known in REGISTERED.items() if known == name), None)
        if holder is None and name in EXAMPLES:
            raise must("a pattern name must be free", f"{name!r}, a pattern of the library")
        if holder is not None and holder.__qualname__ != cls.__qualname__:
            raise must("a pattern name must be free", f"{name!r}, which is {holder.__qualname__}")
        if holder is not None:
            del REGISTERED[holder]
        required, optional = text_fields(cls)
        REGISTERED[cls] = name
        EXAMPLES[name] = name + (":" + ",".join(required) if required else "") + "".join(f";{o}=..." for o in optional)
        _OPTIONS[name] = dict.fromkeys(optional, _literal_option)
        _MAKERS[name] = partial(_registered, cls, required)
        parse.cache_clear()
        _described.cache_clear()
        _changes.append(name)
        return cls

    return register


_changes: list[str] = []


def registrations() -> int:
    """Number of registrations so far, for caches by text."""
    return len(_changes)


def _registered(cls: type[Pattern], required: tuple[str, ...], body: str, keywords: dict[str, Any]) -> Pattern:
    values = [literal(part) for part in body.split(",")] if body else []
    if len(values) != len(required):
        raise ValueError(body)
    return cls(**dict(zip(required, values, strict=True)), **keywords)


def _literal_option(what: str, text: str) -> Any:
    try:
        return literal(text)
    except ValueError:
        raise must(f"{what} must be a number, true, false, a word or integers joined by x", repr(text)) from None


def _depth(pattern: Pattern) -> int:
    """How many patterns lie inside one another, found without recursion."""
    depth, level = 0, [pattern]
    while level and depth <= DEEPEST:
        depth += 1
        level = [inner for outer in level for inner in outer.children]
    return depth


class PatternHandle(str):
    """Process-local name of a pattern that has no text; the pattern lives at least as long as its handle."""

    pattern: Pattern


# Handles are unique between processes, so that a saved graph never resolves to another pattern. The identifier is drawn
# at import because the compiler warns about `uuid4` in traced code.
_PROCESS = uuid4().hex
_serial = count()
_by_name: WeakValueDictionary[str, Pattern] = WeakValueDictionary()
_names: WeakKeyDictionary[Pattern, str] = WeakKeyDictionary()


def is_writable(pattern: Pattern) -> bool:
    """Whether `parse` reads the description of a pattern back."""
    if type(pattern) in REGISTERED:
        return registered_text(pattern) is not None
    return _has_library_text(pattern) and all(map(is_writable, pattern.children))


def is_library_text(pattern: Pattern) -> bool:
    """Whether `parse` reads the description back without registered classes; `torch.compile` traces `describe` then."""
    return _has_library_text(pattern) and all(map(is_library_text, pattern.children))


def _has_library_text(pattern: Pattern) -> bool:
    return type(pattern) in _WRITABLE and not (isinstance(pattern, BlockLists) and not pattern.is_writable)


def to_operand(pattern: Pattern) -> str:
    """The pattern as a string for torch's operators: its text, or a handle where it has none."""
    if is_writable(pattern):
        return _described(pattern)
    if type(pattern).__hash__ is None:
        name = type(pattern).__name__
        raise must_be(f"{name} must be hashable", "a mutable dataclass", "Declare it @dataclass(frozen=True).")
    name = _names.get(pattern)
    held = None if name is None else _by_name.get(name)
    if name is None or held is None:
        name, held = f"@{_PROCESS}-{next(_serial)}", pattern
        _names[pattern], _by_name[name] = name, pattern
    handle = PatternHandle(name)
    handle.pattern = held
    return handle


def from_operand(text: str) -> Pattern:
    """The pattern of a string that `to_operand` made, or of any pattern text."""
    if not text.startswith("@"):
        return parse(text)
    pattern = _by_name.get(text)
    if pattern is None:
        raise must(
            "a pattern without text must be alive in the process that runs the operator",
            text,
            "To export a pattern of your own, give its class a name with register_pattern. Patterns of functions, and "
            "block lists of more than 4096 entries, cannot be exported.",
        )
    return pattern


@lru_cache(maxsize=1024)
def _described(pattern: Pattern) -> str:
    return pattern.describe()


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
        if re.search(r"\b(and|or)\b", self.text):
            joined = re.sub(r"\band\b", "&", re.sub(r"\bor\b", "|", self.text))
            return must("patterns must be joined by & and |", _shown(self.text), f"Write {_shown(joined)}.")
        where = f"before {self.peek()!r}" if self.peek() else "at the end"
        return must(f"pattern text must have {expected} {where}", _shown(self.text))

    def too_deep(self) -> ValueError:
        return must(f"pattern text must have at most {DEEPEST} patterns inside one another", _shown(self.text))

    def arguments(self, name: str, token: str) -> ValueError:
        """Error for the arguments of one pattern, with the text around it."""
        if re.search(r"\b(and|or)\b", token):
            return self.error("an operator")
        whole = None if token == self.text.strip() else f"It is part of {_shown(self.text)}."
        return must(f"{name} must be written like {EXAMPLES[name]}", _shown(token), whole)

    def unknown(self, name: str) -> ValueError:
        """Error for a name that is no pattern, with the closest name that is."""
        if not name.isidentifier():
            self.at -= 1
            return self.error("& or | between patterns" if len(name.split()) > 1 else "a pattern")
        came = repr(name) if name == self.text.strip() else f"{name!r} in {_shown(self.text)}"
        close = get_close_matches(name.lower(), [*EXAMPLES, *OTHER_NAMES], n=1)
        if not close:
            return must("a pattern name must be known", came, f"Known: {', '.join(EXAMPLES.values())}")
        meant = OTHER_NAMES.get(close[0], close[0])
        return must("a pattern name must be known", came, f"Did you mean {meant!r}? Example: {EXAMPLES[meant]}")

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
            raise self.unknown(name)
        keywords = _keywords(name, tail)
        try:
            return _MAKERS[name](body, keywords)
        except (TypeError, IndexError, KeyError, ValueError) as error:
            if isinstance(error, ValueError) and "must" in str(error):
                raise
            raise self.arguments(name, token) from None

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
        keywords = _keywords("packed", tail)
        try:
            documents = _numbers(lengths.removeprefix("documents:"))
        except ValueError:
            raise self.arguments("packed", self.text.strip()) from None
        return Packed(pattern, documents, **keywords)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 500 else f"{text[:250]!r} ... {text[-100:]!r}"


def _keywords(name: str, tail: list[str]) -> dict[str, Any]:
    """The `;option=value` tail of a pattern, each value read as its option's kind."""
    known, found = _OPTIONS.get(name, {}), {}
    for part in tail:
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if option not in known:
            allowed = f"no options but {', '.join(known)}" if known else "no options"
            raise must(f"{name} must have {allowed}", repr(part.strip()))
        if not equals or option in found:
            raise must(f"{name} must have {option}=value at most once", repr(";".join(tail)))
        found[option] = known[option](f"{option} of {name}", value)
    return found


def _whole(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise must(f"{what} must be an integer", repr(text)) from None


def _fraction(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise must(f"{what} must be a number", repr(text)) from None


def _word(what: str, text: str) -> str:
    return text


def _switch(what: str, text: str) -> bool:
    switches = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in switches:
        raise must(f"{what} must be one of {', '.join(switches)}", repr(text))
    return switches[text.lower()]


def _axes(what: str, text: str) -> tuple[int, ...] | int:
    try:
        values = tuple(int(part) for part in text.split("x"))
    except ValueError:
        raise must(f"{what} must be integers joined by x, one per axis", repr(text)) from None
    return values[0] if len(values) == 1 else values


_BLOCK: dict[str, Callable[[str, str], Any]] = {"block": _whole, "length": _whole}
_OPTIONS: dict[str, dict[str, Callable[[str, str], Any]]] = {
    "window": {"after": _whole},
    "global": {"queries": _switch},
    "dilated": {"offset": _word, "overlap": _word, "heads": _word, "num_heads": _whole},
    "strided": {"block": _whole},
    "random": {"seed": _whole, "per_head": _switch} | _BLOCK,
    "hierarchical": _BLOCK,
    "block_dilated": {"sparsity_ratio": _fraction, "reserved": _whole} | _BLOCK,
    "block_columns": _BLOCK,
    "blocks": {"heads": _whole} | _BLOCK,
    "packed": {"num_heads": _whole},
    "grid": {"window": _axes, "dilation": _axes, "causal": _axes, "prefix": _whole},
}
"""Options of each pattern in text, with the reader of their values."""


def _numbers(body: str) -> tuple[int, ...]:
    return tuple(int(part) for part in body.split(","))


def _pairs(body: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pairs = [(int(a), int(b)) for a, b in (part.split("x") for part in body.split(","))]
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def _nothing(kind: Callable[[], Pattern]) -> Callable[[str, dict[str, Any]], Pattern]:
    def make(body: str, keywords: dict[str, Any]) -> Pattern:
        if body:
            raise ValueError(body)
        return kind(**keywords)

    return make


def _block_lists(body: str, keywords: dict[str, Any]) -> Pattern:
    if body.startswith("@"):
        raise must("block lists must be written out", f"the digest {body}", "Pass the BlockLists object itself.")
    heads, length = integer("heads of blocks", keywords.get("heads", 1), 1), keywords.get("length")
    written = [row.split() for row in body.split(",")]
    if len(written) % heads:
        raise must(f"rows of blocks must be a multiple of heads={heads}", f"{len(written)} rows")
    rows = [[] if row == ["-"] else [int(j) for j in row] for row in written]
    each = len(rows) // heads
    by_head = [rows[h * each : (h + 1) * each] for h in range(heads)]
    lists = BlockLists.of(by_head if heads > 1 else rows, keywords.get("block", 128))
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
    "block_columns": lambda body, keywords: BlockColumns(int(body), **keywords),
    "blocks": _block_lists,
    "grid": lambda body, keywords: Grid(tuple(int(part) for part in body.split("x")), **keywords),
}
_COMPOSITES = And, Or, PerHead, Packed
_LEAVES = Full, Causal, SlidingWindow, Global, Documents, Dilated, Strided, Grid
_WRITABLE = frozenset((*_COMPOSITES, *_LEAVES, Random, Hierarchical, BlockDilated, BlockColumns, BlockLists))
"""Classes whose description `parse` reads back."""
