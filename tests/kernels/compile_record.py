"""Record of compilations whose checks passed, so that equal ones are not repeated.

A compilation for a GPU takes two to three seconds and follows from its inputs alone. `compile_record.json` holds a
digest of these inputs for each test. After a change of a kernel or of a check, the affected tests compile again, and

    DAP_COMPILE=record pytest -n 0 tests/kernels/test_{selection_,triton_,hopper*}compile.py

records the new digests. DAP_COMPILE=all repeats every compilation.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dilated_attention_pytorch.tools.bench.measure import git_sha

Compilations = Sequence[tuple[Any, dict[str, Any]]]
"""Sources and options."""
RECORD = Path(__file__).with_suffix(".json")
"""Digests by release of Triton and test."""
SAMPLE = 20
"""One in so many recorded compilations is repeated, another one at each commit."""


class Unchanged(Exception):
    """The inputs of a compilation are the recorded ones."""


class Check:
    """Test of compiled kernels."""

    running: Check | None = None

    def __init__(self, files: list[str]) -> None:
        self.name = os.environ["PYTEST_CURRENT_TEST"].split("/")[-1].removesuffix(" (call)")
        self.text = "".join(Path(file).read_text(encoding="utf-8") for file in files)
        self.release = self.digest = ""

    def begin(self, target: Any, compilations: Compilations) -> None:
        """Take the digest of the inputs of compilations; raise `Unchanged` if it is recorded and not in the sample."""
        assert not self.digest, "a test with a record compiles all its kernels in one call"
        self.release, inputs = inputs_of(target, compilations)
        self.digest = digest(self.name, self.text, *inputs)
        unchanged = stored().get(self.release, {}).get(self.name) == self.digest
        if unchanged and not os.environ.get("DAP_COMPILE") and not is_sampled(self.name, commit()):
            raise Unchanged

    def record(self) -> None:
        record = stored()
        record.setdefault(self.release, {})[self.name] = self.digest
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def passes_once(*modules: ModuleType) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test of compiled kernels, which ends before compilations that are recorded as passed.

    The digest covers everything from which the result follows: Triton, its assembler and settings, the sources of the
    kernels and of the functions that they call, constants, types and options, the parameters of the test, and the text
    of its module, of the module that compiles and of `modules`. The record of one release of Triton says nothing of
    another, where every test compiles.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        files = [test.__code__.co_filename, *(str(module.__file__) for module in modules)]
        files.append(str(Path(__file__).with_name("assembler.py")))

        @functools.wraps(test)
        def run(*args: Any, **named: Any) -> None:
            Check.running = check = Check(files)
            try:
                test(*args, **named)
            except Unchanged:
                return
            finally:
                Check.running = None
            if os.environ.get("DAP_COMPILE") == "record":
                check.record()

        return run

    return decorate


def inputs_of(target: Any, compilations: Compilations) -> tuple[str, list[str]]:
    """Release of Triton, and the parts of the keys of its own cache."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend

    backend = make_backend(target)
    environment = sorted(get_cache_invalidating_env_vars().items())
    keys = sorted(
        f"{source.hash()} {backend.parse_options(options | source.parse_options()).hash()}"
        for source, options in compilations
    )
    return triton.__version__, [compiler(), backend.hash(), str(environment), *keys]


@functools.cache
def compiler() -> str:
    """Digest of the files of Triton, which takes half a second."""
    from triton.runtime.cache import triton_key

    return triton_key()


@functools.cache
def commit() -> str:
    return git_sha() or ""


def is_sampled(name: str, commit: str) -> bool:
    """Whether a test compiles at a commit although nothing changed."""
    return int(digest(name, commit), 16) % SAMPLE == 0


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def stored() -> dict[str, dict[str, str]]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
