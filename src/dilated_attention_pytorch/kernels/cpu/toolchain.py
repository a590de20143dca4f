"""Compilation of the C++ kernel, without torch: for this machine at first use, and for wheels by `src/hatch_build.py`.

A library of a wheel runs on every processor of its level and on every Linux whose glibc is not older than that of its
wheel's tag. It links no C++ runtime and takes OpenMP from the process that loads it. Its name is a digest of the
sources and flags, so that a library of other sources is never loaded.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = ("native.cpp", "native_tiles.h", "native_match.h", "native_choose.h", "native_lanes.h")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra")
HERE = ("-march=native",)
STANDALONE = ("-fopenmp", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-DDAP_STANDALONE")
EXPORTED = (
    "{ global: forward_float; forward_double; backward_float; backward_double; "
    "best_match_float; best_match_double; choose_blocks; call_bytes; local: *; };"
)

V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())  # noqa: SIM905
V4 = V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())  # noqa: SIM905
LEVELS: dict[str, dict[str, tuple[tuple[str, ...], frozenset[str]]]] = {
    "x86_64": {
        "avx512": (("-march=x86-64-v4",), V4),
        "avx2": (("-march=x86-64-v3",), V3),
    },
    "aarch64": {"neon": (("-march=armv8-a",), frozenset())},
}
"""Machine -> level, the fastest first -> compiler flags, and processor flags that the level needs."""


def digest_of(*about: object) -> str:
    """Sixteen hexadecimal digits that change with the sources and with whatever else is given."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    digest.update(repr(about).encode())
    return digest.hexdigest()[:16]


def wheel_name(machine: str, level: str) -> str:
    """File name of a wheel's library."""
    flags, _ = LEVELS[machine][level]
    return f"native-{machine}-{level}-{digest_of(FLAGS, STANDALONE, flags)}.so"


def processor_flags() -> str:
    """Line of /proc/cpuinfo with the instruction sets of this processor."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group() if found else platform.processor()


def level_here() -> str | None:
    """Highest level that this processor runs; None where wheels have none for it."""
    flags = frozenset(processor_flags().split())
    return next((name for name, (_, needed) in LEVELS.get(platform.machine(), {}).items() if needed <= flags), None)


def run(step: Sequence[str]) -> None:
    """Run a compiler; its messages are the text of the error."""
    done = subprocess.run(step, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(step)}\n{done.stderr}")


def build_here(compiler: str, target: Path, flags: Sequence[str], runtime: Path | None) -> None:
    """Compile for this processor, on the OpenMP library that torch has loaded, or without threads."""
    source, built = Path(__file__).with_name(SOURCES[0]), target.with_suffix(".o")
    openmp = ["-fopenmp"] if runtime else ["-Wno-unknown-pragmas"]
    run([compiler, *FLAGS, *HERE, *flags, *openmp, "-c", str(source), "-o", str(built)])
    # Linking apart from compiling keeps the compiler's own OpenMP library out: torch's is the one to share.
    link = [compiler, *flags, "-shared", str(built), "-o", str(target)]
    run([*link, str(runtime), f"-Wl,-rpath,{runtime.parent}"] if runtime else link)


def build_for_wheel(compiler: str, folder: Path, machine: str) -> list[Path]:
    """Compile a library for each level of a machine into a folder, beside each other."""
    source = str(Path(__file__).with_name(SOURCES[0]))
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor() as pool:
        script = Path(work) / "exported"
        script.write_text(EXPORTED)

        def build(level: str) -> Path:
            built, target = str(Path(work) / f"{level}.o"), folder / wheel_name(machine, level)
            flags, _ = LEVELS[machine][level]
            run([compiler, *FLAGS, *flags, *STANDALONE, "-c", source, "-o", built])
            hidden = f"-Wl,--version-script={script}"
            run([compiler, "-shared", "-nostdlib", built, hidden, "-Wl,-s", "-o", str(target), "-lc", "-lm", "-lgcc"])
            return target

        return list(pool.map(build, LEVELS[machine]))


def glibc_of(libraries: Sequence[Path]) -> tuple[int, int]:
    """Oldest glibc that has every symbol of some libraries; at least 2.17, which pip knows for all machines."""
    found = [re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes()) for library in libraries]
    return 2, max([17, *(int(minor) for versions in found for minor in versions)])
