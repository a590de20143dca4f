"""Text form of learned attention, such as "learned:0.1;block=64;score_unit=4"."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ...errors import must
from ...patterns.base import literal
from .config import AdaptiveConfig

DEFAULTS = AdaptiveConfig()
TYPES: dict[str, Any] = {field.name: field.type for field in fields(AdaptiveConfig)}
BLOCK_SIZE = 128
FORM = 'Write it as "learned:0.1;block=64": the fraction of blocks kept, and the tokens of a block.'


@dataclass(frozen=True, slots=True)
class LearnedText:
    """Settings of learned attention that a text names.

    >>> LearnedText.parse("learned:0.06;block=64;score_unit=4").config.kept
    0.06
    >>> str(LearnedText(AdaptiveConfig(base_sparsity=0.75, sink_blocks=0), 32))
    'learned:0.25;block=32;sink_blocks=0'
    """

    config: AdaptiveConfig
    block_size: int

    @staticmethod
    def matches(text: object) -> bool:
        """Whether a value is the text of learned attention."""
        return isinstance(text, str) and text.replace(":", ";").partition(";")[0].strip() == "learned"

    @classmethod
    def parse(cls, text: str) -> LearnedText:
        """Settings from "learned[:KEPT][;block=TOKENS][;FIELD=VALUE]...", with the fields of `AdaptiveConfig`."""
        head, *options = text.split(";")
        kept = head.partition(":")[2].strip()
        given: dict[str, Any] = {}
        if kept:
            share = _value(kept)
            if not isinstance(share, int | float) or not 0.0 < share <= 1.0:
                raise must("the fraction of blocks kept must lie in (0, 1]", kept, FORM)
            given["base_sparsity"] = round(1.0 - share, 12)
        defaults: dict[str, Any] = {"block": BLOCK_SIZE} | _options(DEFAULTS)
        for option in options:
            name, _, value = (part.strip() for part in option.partition("="))
            if name not in defaults:
                raise must(f"options of learned attention must be among {', '.join(defaults)}", repr(option), FORM)
            given[name] = _value(value) if value else ""
            usual = defaults[name]
            # Annotations are text here.
            is_float = "float" in TYPES.get(name, "int")
            kinds = (int, float) if is_float else (int if usual is None else type(usual),)
            if type(given[name]) not in kinds:
                raise must(f"{name} must be of type {kinds[-1].__name__}", repr(value), FORM)
        block_size = given.pop("block", BLOCK_SIZE)
        return cls(replace(DEFAULTS, **given), block_size)

    def __str__(self) -> str:
        config = _options(self.config)
        changed = {name: value for name, value in config.items() if value != getattr(DEFAULTS, name)}
        words = "".join(f";{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in changed.items())
        return f"learned:{self.config.kept:.12g};block={self.block_size}{words}"


def _value(text: str) -> Any:
    """Value in the text of an option; text that no value has is left to the checks of its field."""
    try:
        return literal(text)
    except ValueError:
        return text


def _options(config: AdaptiveConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name != "base_sparsity"}
