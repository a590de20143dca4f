"""Base class of patterns: predicates over query position, key position and head.

Positions are plain integers or any array of integers with Python's operators (torch tensors
broadcast), so one definition serves single pairs, the dense oracle and the planner.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from hashlib import sha256
from inspect import isfunction, ismethod, ismodule
from types import CodeType
from typing import Any
from weakref import ref

from ..errors import must, must_be

EXTENSIBLE = frozenset({"Pattern", "BlockPattern"})
"""Classes of the library whose methods a subclass outside the library may override."""
CONSTRUCTORS: dict[str, Callable[..., Pattern]] = {}
"""Constructors that `Pattern` offers by name and a later module defines."""
REGISTERED: dict[type[Pattern], str] = {}
"""Names in pattern text of classes outside the library, entered by `register_pattern`."""


class Pattern:
    """A frozen, hashable value. Combine with `&` (both allow) and `|` (either allows, each key counted once).

    A subclass defines `allows`. A subclass that overrides `multiplicity` also overrides `max_multiplicity`.
    Instances compare by value: dataclasses by their fields, other classes by their attributes.
    """

    __slots__ = ("__weakref__",)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        package = __name__.split(".")[0]
        if cls.__module__.split(".")[0] == package:
            return
        methods = {name for name, value in vars(cls).items() if isfunction(value) or isinstance(value, property)}
        for base in cls.__mro__[1:]:
            # The planner has closed forms for the library's patterns, which an overridden method would contradict.
            closed = base.__module__.split(".")[0] == package and base.__name__ not in EXTENSIBLE
            taken = sorted(name for name in methods if name in vars(base) and not name.startswith("__"))
            if closed and taken:
                raise TypeError(
                    f"expected {cls.__name__} to keep the methods of {base.__name__}, got its own {', '.join(taken)}; "
                    f"derive from Pattern or BlockPattern instead, because {base.__name__} is planned in closed form"
                )

    @staticmethod
    def from_mask(mask: Any) -> Pattern:
        """Pattern of a boolean mask, True where a query attends, as in `scaled_dot_product_attention`.

        Args:
            mask: bool (n, n), (heads, n, n) or (1, heads, n, n).

        The pattern stores the kept blocks if every block of 16 to 128 tokens is all True or all False, otherwise
        the kept pairs, 4 bytes each.

        >>> import torch
        >>> Pattern.from_mask(torch.ones(3, 3, dtype=torch.bool).tril())
        blocks:0,0 1,0 1 2;block=1
        """
        return CONSTRUCTORS["mask"](mask)

    @staticmethod
    def from_mask_mod(mask_mod: Callable[..., Any]) -> Pattern:
        """Pattern of a FlexAttention `mask_mod(b, h, q_idx, kv_idx)`, which must not depend on `b`.

        A plan calls the function with bounds of positions first, then with index tensors for the tiles that the bounds
        leave open: few for windows, documents and prefixes in integer arithmetic, all n x n pairs per head for a
        function with control flow or floating point. Intersect with a pattern of the library to evaluate fewer:
        `Pattern.from_mask_mod(f) & SlidingWindow(512)`. Functions are equal if their code and captured values are.

        >>> Pattern.from_mask_mod(lambda b, h, q, k: (q - k) % 3 == 0).allows(7, 1)
        True
        """
        return CONSTRUCTORS["mask_mod"](mask_mod)

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        """Whether the query at `q` attends to the key at `k` in this head."""
        raise NotImplementedError

    def key_range(self, first: Any, last: Any, head: int = 0) -> tuple[Any, Any] | None:
        """Inclusive bounds of the keys that queries `first` to `last` attend to; None for all keys.

        `first` and `last` are int64 tensors with one element per range of queries; bounds may lie outside the
        sequence. A subclass overrides this method so that the planner evaluates `allows` inside the bounds only.
        """
        return None

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        """How often the pair counts in the softmax; 0 means it is not allowed."""
        return self.allows(q, k, head) * 1

    @property
    def children(self) -> tuple[Pattern, ...]:
        """Patterns that this pattern combines."""
        return ()

    @property
    def max_multiplicity(self) -> int:
        """Upper bound of `multiplicity` over all pairs and heads."""
        return 1

    def resolve(self, n: int, heads: int) -> Pattern:
        """The same pattern with the sequence length and head count filled in; resolving twice changes nothing."""
        return self

    def describe(self) -> str:
        """Name of the pattern in messages and plans; text that `parse` reads back where the pattern has text."""
        named = fields(self) if is_dataclass(self) else ()
        values = {field.name: getattr(self, field.name) for field in named} or getattr(self, "__dict__", {})
        text = registered_text(self)
        if text is not None:
            return text
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def __str__(self) -> str:
        return self.describe()

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        return _attributes(self) == _attributes(other)

    def __hash__(self) -> int:
        return hash((type(self), _attributes(self)))

    def __bool__(self) -> bool:
        raise must_be(
            "a pattern must not be used as a truth value",
            f"{self}",
            "Python's `and`, `or` and `not` drop one side; combine patterns with & and |.",
        )

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, _pattern(other))

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, _pattern(other))


def _attributes(pattern: object) -> object:
    return value_key(vars(pattern)) if hasattr(pattern, "__dict__") else id(pattern)


class _Identity:
    """Key of an object: equal for the same object with the same state. An object made in its place has another key."""

    __slots__ = ("_address", "_object", "_state")

    def __init__(self, value: Any, state: object) -> None:
        try:
            self._object: Callable[[], Any] = ref(value)
        except TypeError:
            self._object = lambda: value
        self._address, self._state = id(value), state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or self is other:
            return self is other
        own = self._object()
        return own is not None and own is other._object() and self._state == other._state

    def __hash__(self) -> int:
        return hash((self._address, self._state))


def value_key(value: Any, outer: tuple[int, ...] = (), names: frozenset[str] = frozenset()) -> object:
    """Hashable key of a value: containers, arrays and functions by contents, tensors by identity and version.

    `outer` holds the functions and objects around the value, which may refer to themselves; `names` the names that the
    function around it reads: attributes of an object that have one of them count as captured.
    """
    if isinstance(value, dict):
        return "dict", tuple(sorted((repr(name), value_key(item, outer, names)) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return type(value), tuple(value_key(item, outer, names) for item in value)
    if isinstance(value, type) or id(value) in outer:
        return type(value), value if isinstance(value, type) else id(value)
    if hasattr(value, "is_inference") and hasattr(value, "data_ptr"):
        return _Identity(value, None if value.is_inference() else value._version)
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return str(value.dtype), value.shape, sha256(value.tobytes()).digest()
    if isfunction(value):
        return _function_key(value, (*outer, id(value)))
    if isinstance(value, partial):
        return partial, value_key((value.func, value.args, value.keywords), outer)
    call = value if ismethod(value) else getattr(value, "__call__", None)  # noqa: B004
    if ismethod(call):
        # The names of a method are read from its object; those of a function around it may be as well.
        names = names.union(_names_read(call.__func__.__code__))
        return value_key(call.__func__, outer), _object_key(call.__self__, outer, names)
    return _object_key(value, outer, names)


def _object_key(value: Any, outer: tuple[int, ...], names: frozenset[str]) -> object:
    own = {} if ismodule(value) else getattr(value, "__dict__", {})
    # Buffers and parameters of an nn.Module.
    held = {**own, **own.get("_buffers", {}), **own.get("_parameters", {})}
    state = tuple((name, value_key(held[name], (*outer, id(value)), names)) for name in sorted(names & held.keys()))
    try:
        hash(value)
    except TypeError:
        return type(value), frozenset(value) if isinstance(value, set) else _Identity(value, state)
    # 1, 1.0 and True are equal, and a predicate may distinguish them.
    return type(value), value, state


def _function_key(function: Any, outer: tuple[int, ...]) -> object:
    code, scope = function.__code__, function.__globals__
    names = _names_read(code)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    read = (scope[name] for name in sorted(names) if name in scope)
    captured = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items(), *cells, *read
    return code, tuple(value_key(value, outer, names) for value in captured if id(value) not in outer)


def _names_read(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function and in the functions inside it."""
    inner = (_names_read(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


PLAIN = re.compile(r"[A-Za-z_][\w.+-]*")
"""Words that pattern text may hold as values."""


def literal(text: str) -> Any:
    """Value of an argument in pattern text: `true`, `12`, `0.5`, `2x3` for a tuple of integers, or a word."""
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+(x-?\d+)+|-?\d+x", text):
        return tuple(int(part) for part in text.split("x") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if not PLAIN.fullmatch(text):
        raise must("a value must be a number, true, false, a word or integers joined by x", text)
    return text


def _literal_text(value: object) -> str | None:
    """Text that `literal` reads back as an equal value of the same type; None where there is none."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, tuple):
        text = "x".join(map(str, value)) + ("x" if len(value) == 1 else "")
    try:
        found = literal(text)
    except ValueError:
        return None
    return text if type(found) is type(value) and found == value else None


def registered_text(pattern: Any) -> str | None:
    """Text of a pattern of a registered class; None for other classes, and for values that text cannot hold."""
    name = REGISTERED.get(type(pattern))
    if name is None:
        return None
    required, optional = text_fields(type(pattern))
    values = {field: _literal_text(getattr(pattern, field)) for field in required}
    values |= {
        f: _literal_text(getattr(pattern, f)) for f, default in optional.items() if getattr(pattern, f) != default
    }
    if None in values.values():
        return None
    body = ",".join(str(values.pop(field)) for field in required)
    return name + (f":{body}" if body else "") + "".join(f";{field}={value}" for field, value in values.items())


def text_fields(kind: type) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Fields of a dataclass that its text gives by position, and fields with defaults, which it gives by name."""
    own: Any = fields(kind)
    required = tuple(f.name for f in own if f.init and f.default is MISSING and f.default_factory is MISSING)
    rest = [f for f in own if f.init and f.name not in required]
    return required, {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in rest}


def _pattern(value: object) -> Pattern:
    if not isinstance(value, Pattern):
        raise must_be("a pattern combines with a Pattern", repr(value), 'Text becomes one with parse("causal").')
    return value


@dataclass(frozen=True, slots=True, repr=False)
class And(Pattern):
    """Both sides allow; multiplicities multiply.

    window 1 & causal:   0 1 2 3
                       0 # . . .
                       1 # # . .
                       2 . # # .
                       3 . . # #
    """

    left: Pattern
    right: Pattern

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.left.allows(q, k, head) & self.right.allows(q, k, head)

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.left.multiplicity(q, k, head) * self.right.multiplicity(q, k, head)

    @property
    def children(self) -> tuple[Pattern, ...]:
        return self.left, self.right

    @property
    def max_multiplicity(self) -> int:
        return self.left.max_multiplicity * self.right.max_multiplicity

    def resolve(self, n: int, heads: int) -> Pattern:
        return And(self.left.resolve(n, heads), self.right.resolve(n, heads))

    def describe(self) -> str:
        right = self.right.describe()
        # Both operators group to the left, so a composite on the right needs its parentheses to come back equal.
        right = f"({right})" if isinstance(self.right, And | Or) else right
        left = self.left.describe()
        left = f"({left})" if isinstance(self.left, Or) else left
        return f"{left} & {right}"


@dataclass(frozen=True, slots=True, repr=False)
class Or(Pattern):
    """Either side allows; a key allowed by both counts once.

    window 0 | global 1:   0 1 2 3
                         0 # . . .
                         1 # # . .
                         2 # . # .
                         3 # . . #
    """

    left: Pattern
    right: Pattern

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.left.allows(q, k, head) | self.right.allows(q, k, head)

    @property
    def children(self) -> tuple[Pattern, ...]:
        return self.left, self.right

    def resolve(self, n: int, heads: int) -> Pattern:
        return Or(self.left.resolve(n, heads), self.right.resolve(n, heads))

    def describe(self) -> str:
        right = self.right.describe()
        right = f"({right})" if isinstance(self.right, Or) else right
        return f"{self.left.describe()} | {right}"


@dataclass(frozen=True, slots=True, repr=False)
class PerHead(Pattern):
    """Head h follows the h-th pattern.

    PerHead((SlidingWindow(0), Causal())):   head 0   # . .   head 1   # . .
                                                      . # .            # # .
                                                      . . #            # # #
    """

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple(_pattern(p) for p in self.patterns))
        if not self.patterns:
            raise must("PerHead must name one pattern per head", "none")

    def allows(self, q: Any, k: Any, head: Any = 0) -> Any:
        return self.multiplicity(q, k, head) > 0

    def multiplicity(self, q: Any, k: Any, head: Any = 0) -> Any:
        if isinstance(head, int):
            return self.patterns[head].multiplicity(q, k, head)
        return sum((head == h) * p.multiplicity(q, k, head) for h, p in enumerate(self.patterns))

    @property
    def children(self) -> tuple[Pattern, ...]:
        return self.patterns

    @property
    def max_multiplicity(self) -> int:
        return max(pattern.max_multiplicity for pattern in self.patterns)

    def resolve(self, n: int, heads: int) -> Pattern:
        if len(self.patterns) != heads:
            raise must(
                f"the call must have the pattern's {len(self.patterns)} heads",
                heads,
                "Give PerHead one pattern for each head of the query.",
            )
        return PerHead(tuple(p.resolve(n, heads) for p in self.patterns))

    def describe(self) -> str:
        return "heads{" + " / ".join(p.describe() for p in self.patterns) + "}"


def options(pattern: Any, *names: str) -> str:
    """The `;name=value` tail of a description: the named fields that differ from their defaults."""
    # The compiler traces this function, and cannot represent the default of a field that has none.
    defaults = {f.name: f.default for f in fields(pattern) if f.name in names}
    values = {name: getattr(pattern, name) for name in names}
    return "".join(
        f";{name}={int(value) if isinstance(value, bool) else value}"
        for name, value in values.items()
        if value != defaults[name]
    )


LARGEST = 2**48
"""Largest length in a pattern: its products and sums fit 64 bits, which wrap around silently."""


def integer(what: str, value: object, least: int, most: int = LARGEST) -> int:
    """`value` as an int of `least` .. `most`, or an error that names the parameter."""
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise must_be(f"{what} must be an integer", repr(value))
    # An argument that varies is an `int` to the compiler, and has no attributes to ask for.
    number = int(value if isinstance(value, int) else value.__index__())  # pyrefly: ignore[missing-attribute]
    if number < least:
        raise must(f"{what} must be >= {least}", number)
    if number > most:
        raise must(f"{what} must be <= {most}", number)
    return number


def flag(what: str, value: object) -> bool:
    """`value` as a bool, from a bool or the integers 0 and 1."""
    if isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    raise must_be(f"{what} must be True or False", repr(value))


def integers(what: str, values: object, least: int) -> tuple[int, ...]:
    """A non-empty sequence of such integers as a tuple."""
    try:
        items = tuple(values)  # pyrefly: ignore[bad-argument-type]
    except TypeError:
        raise must_be(f"{what} must be a sequence of integers", repr(values)) from None
    if not items:
        raise must(f"{what} must not be empty", "()")
    return tuple(integer(what, item, least) for item in items)
