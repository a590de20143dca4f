"""A pattern as a sum of terms: one strided axis each, conditions on it, and what earlier terms already counted.

Multiplicities add over terms, so a counting dilated pattern is one term a branch; a union becomes terms of
which each leaves out what the ones before it cover.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import ceil

import torch
from torch import Tensor

from ..errors import must
from ..patterns import And, Dilated, Documents, Full, Or, Packed, Pattern, PerHead, Strided
from .closed_forms import AtLeast, closed_form

MOST_TERMS = 512
"""Terms of a pattern and conditions on them, all together; planning takes time for each."""


@dataclass(frozen=True, slots=True)
class Segments:
    """An axis before it is cut into tiles: stretches of tokens and the step between neighbours."""

    rate: int = 1
    length: int | None = None
    """Tokens a segment; None when `documents` or residues decide."""
    offsets: tuple[int, ...] | None = None
    """Residue each head samples; None for 0."""
    documents: tuple[int, ...] | None = None
    residues: bool = False
    """Each residue of the rate is a segment of its own, through the whole sequence."""

    @property
    def whole(self) -> bool:
        """Whether the axis is the sequence itself."""
        return self == Segments()

    def bounds(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """First token and end of each segment, int64 [S]."""
        if self.documents is not None:
            lengths = torch.tensor(self.documents, dtype=torch.int64, device=device)
            end = lengths.cumsum(0)
            return end - lengths, end
        if self.residues:
            start = torch.arange(min(self.rate, n), device=device)
            return start, torch.full_like(start, n)
        length = min(self.length or n, n)
        start = torch.arange(ceil(n / length), device=device) * length
        return start, (start + length).clamp(max=n)


@dataclass(frozen=True, slots=True)
class Term:
    """A summand of a pattern."""

    axis: Segments = Segments()
    where: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()
    heads: frozenset[int] | None = None
    """Heads that take part; None for all."""

    @property
    def conditions(self) -> tuple[Pattern, ...]:
        return self.where + self.exclude


def terms_of(pattern: Pattern, heads: int) -> list[Term]:
    """Split a resolved pattern into terms whose multiplicities add up to its own."""
    terms, weight = [], 0
    for term in _terms(pattern, heads):
        weight += 1 + len(term.conditions)
        if weight > MOST_TERMS:
            raise must(
                f"a pattern must split into at most {MOST_TERMS} terms and conditions",
                f"more, for {_shortened(pattern.describe())}",
                "Each branch of a dilated pattern is a term; `&` multiplies the terms of its sides, and a union of "
                "dilated branches leaves out each earlier branch.",
            )
        terms.append(term)
    return terms


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


def _terms(pattern: Pattern, heads: int) -> Iterable[Term]:
    match pattern:
        case Dilated():
            # Split heads run one branch each, so nothing can be counted twice.
            if pattern.overlap == "union" and pattern.heads == "all" and len(pattern.segment_lengths) > 1:
                branches: list[Pattern] = [
                    replace(pattern, segment_lengths=(w,), dilation_rates=(r,)) for w, r in pattern.branches
                ]
                return _union(branches, heads)
            return (_branch_term(pattern, index, heads) for index in range(len(pattern.segment_lengths)))
        case Documents():
            return [Term(Segments(documents=pattern.lengths))]
        case Strided(block=1) if pattern.stride > 1:
            return [Term(Segments(rate=pattern.stride, residues=True))]
        case And():
            sides = terms_of(pattern.left, heads), terms_of(pattern.right, heads)
            return (
                _both(left, right, heads)
                for left, right in product(*sides)
                if left.heads is None or right.heads is None or left.heads & right.heads
            )
        case Or():
            return _union(_members(pattern), heads)
        case PerHead():
            return _per_head(pattern, heads)
        case Full():
            return [Term()]
        case _:
            # The number of levels that a pair reaches is its multiplicity.
            if pattern.max_multiplicity == 1:
                return [Term(where=(pattern,))]
            return (Term(where=(AtLeast(pattern, level),)) for level in range(1, pattern.max_multiplicity + 1))


def packed_form(pattern: Pattern) -> Pattern:
    """An equal pattern with `Packed` outermost, where there is one: documents are then planned apart.

    A condition on the difference of positions holds inside a document as it does in the whole sequence.
    """
    match pattern:
        case Packed():
            inner = packed_form(pattern.pattern)
            if isinstance(inner, Packed) and set(pattern.lengths) == {sum(inner.lengths)}:
                return replace(inner, lengths=inner.lengths * len(pattern.lengths), num_heads=pattern.num_heads)
            return replace(pattern, pattern=inner)
        case And() | Or():
            left, right = packed_form(pattern.left), packed_form(pattern.right)
            match left, right:
                case Packed(), Packed() if left.lengths == right.lengths:
                    return replace(left, pattern=type(pattern)(left.pattern, right.pattern))
                case Packed(), _ if isinstance(pattern, And) and closed_form(right).is_shift_invariant:
                    return replace(left, pattern=And(left.pattern, right))
                case _, Packed() if isinstance(pattern, And) and closed_form(left).is_shift_invariant:
                    return replace(right, pattern=And(left, right.pattern))
    return pattern


def _branch_term(pattern: Dilated, index: int, heads: int) -> Term:
    segment, rate = pattern.segment_lengths[index], pattern.dilation_rates[index]
    offsets = tuple(int(pattern.sampled_residue(index, h)) for h in range(heads))
    taking_part = frozenset(h for h in range(heads) if pattern.takes_part(index, h))
    return Term(
        Segments(rate, segment, offsets if any(offsets) else None),
        heads=None if len(taking_part) == heads else taking_part,
    )


def _both(left: Term, right: Term, heads: int) -> Term:
    """The product of two terms: the sparser axis carries it, the other becomes a condition."""
    if left.axis.rate < right.axis.rate or left.axis.whole:
        left, right = right, left
    taking_part = left.heads if right.heads is None else right.heads if left.heads is None else left.heads & right.heads
    where = left.where + right.where
    if not right.axis.whole:
        where += (_as_pattern(right.axis, heads),)
    return Term(left.axis, where, left.exclude + right.exclude, taking_part)


def _as_pattern(axis: Segments, heads: int) -> Pattern:
    if axis.documents is not None:
        return Documents(axis.documents)
    if axis.residues:
        return Strided(axis.rate)
    assert axis.length is not None
    offsets = axis.offsets or (0,) * heads
    by_offset = [_OffsetBranch((axis.length,), (axis.rate,), residue=offset) for offset in offsets]
    return by_offset[0] if len(set(offsets)) == 1 else PerHead(tuple(by_offset))


@dataclass(frozen=True, slots=True, repr=False)
class _OffsetBranch(Dilated):
    """One branch with an explicit residue, independent of the head."""

    residue: int = 0

    def sampled_residue(self, index: int, head: object) -> int:
        return self.residue

    def describe(self) -> str:
        return f"{Dilated.describe(self)};residue={self.residue}"


def _members(pattern: Pattern) -> list[Pattern]:
    return _members(pattern.left) + _members(pattern.right) if isinstance(pattern, Or) else [pattern]


def _union(members: list[Pattern], heads: int) -> Iterator[Term]:
    """Terms that count every pair once. Members on the undilated axis go first, together: they cost one term."""
    alternatives = [terms_of(_counted_once(member), heads) for member in members]
    plain = [m for m, terms in zip(members, alternatives, strict=True) if _is_plain(terms)]
    earlier: tuple[Pattern, ...] = ()
    if plain:
        everyone = reduce(Or, plain)
        yield Term(where=(everyone,))
        earlier = (everyone,)
    for member, own in zip(members, alternatives, strict=True):
        if not _is_plain(own):
            yield from (replace(term, exclude=term.exclude + earlier) for term in own)
            earlier += (member,)


def _is_plain(terms: list[Term]) -> bool:
    return len(terms) == 1 and terms[0].axis.whole and terms[0].heads is None and not terms[0].exclude


def _counted_once(pattern: Pattern) -> Pattern:
    match pattern:
        case Dilated():
            return replace(pattern, overlap="union")
        case And():
            return And(_counted_once(pattern.left), _counted_once(pattern.right))
        case PerHead():
            return PerHead(tuple(_counted_once(p) for p in pattern.patterns))
        case _:
            return pattern if pattern.max_multiplicity == 1 else AtLeast(pattern, 1)


def _per_head(pattern: PerHead, heads: int) -> Iterator[Term]:
    for one in dict.fromkeys(pattern.patterns):
        own = frozenset(h for h, p in enumerate(pattern.patterns) if p == one)
        for term in terms_of(one, heads):
            taking_part = own if term.heads is None else own & term.heads
            if taking_part:
                yield replace(term, heads=None if len(taking_part) == heads else taking_part)
