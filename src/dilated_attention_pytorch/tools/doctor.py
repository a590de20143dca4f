"""`dap doctor`: the machine, availability of each backend, and the choice for typical calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..kernels.triton import PACKAGE
from .console import Parser, device_of, leave, print_json, print_pairs, print_table, print_title, usual_dtype

if TYPE_CHECKING:
    from ..kernels.call import AttentionCall

TYPICAL: dict[str, dict[str, Any]] = {
    "LongNet layer, causal": {"pattern": "dilated:1024x1,4096x4 & causal"},
    "block-sparse, grouped key heads": {"pattern": "random:0.1", "key_heads": 2},
    "window with dropout, float64": {"pattern": "window:256", "dropout_p": 0.1, "dtype": "float64"},
}
"""Calls of 4096 tokens, 8 heads of 64, in the usual dtype of the device where none is given."""


def typical_call(
    device: str, pattern: str, *, key_heads: int = 8, dropout_p: float = 0.0, dtype: str | None = None
) -> AttentionCall:
    """A typical call for `why_not` of a backend."""
    import torch

    from ..ops.attention import CallSettings, call_of

    kind = getattr(torch, dtype or usual_dtype(device))
    query = torch.zeros(1, 8, 4096, 64, device=device, dtype=kind)
    key = query[:, :key_heads]
    seed = torch.zeros(1, dtype=torch.int64, device=device) if dropout_p else None
    return call_of(query, key, key, CallSettings(seed=seed, pattern=pattern, scale=0.125, dropout_p=dropout_p))


def surroundings() -> dict[str, str]:
    """Hardware and packages of this process as text; for each missing one, its consequence and remedy."""
    return {
        "GPU": _gpu(),
        PACKAGE: _triton(),
        "compiler": _compiler(),
        "C++ kernel": _native(),
        "cache": _cache(),
        "cores": _cores(),
    }


def _gpu() -> str:
    import warnings

    import torch

    if torch.version.cuda is None:
        return f"none for this torch: {torch.__version__} was built without CUDA; install a CUDA build to use a GPU"
    with warnings.catch_warnings():
        # The error below replaces the warning.
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
        try:
            torch.cuda.init()
        except Exception as error:
            reason = str(error).splitlines()[0]
        else:
            reason = "no device is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return f"none: torch is built for CUDA {torch.version.cuda}, but {reason}"


def _triton() -> str:
    from importlib.util import find_spec

    from .bench.measure import installed

    if find_spec(PACKAGE) is None:
        return "none: the GPU kernels `triton` and `hopper` cannot run; CUDA builds of torch include it"
    from ..kernels.launch import triton_abi

    found, reason = installed(PACKAGE) or "installed, of unknown version", triton_abi.why_not()
    return f"{found}: {reason}" if reason else found


def _compiler() -> str:
    import os
    import shutil

    compiler = os.environ.get("CXX", "g++")
    without = "the C++ kernel cannot be built, and the slower backend `cpu` runs; install g++ or name one in CXX"
    return shutil.which(compiler) or f"none: there is no {compiler}, so {without}"


def _native() -> str:
    """State of the C++ kernel on the CPU; built here where it is missing and can be built."""
    from ..kernels.cpu import native

    native.prepare_first_use()
    reason = native.why_not(typical_call("cpu", "window:256"))
    if reason is None:
        return f"runs attention on the CPU: {native.which_library()}"
    return f"none: {reason}; the slower backend `cpu` runs"


def _cache() -> str:
    import tempfile

    from ..nn.calibration import cache_path

    lost = "the C++ kernel and measured costs cannot be kept; name a place in XDG_CACHE_HOME"
    try:
        folder = cache_path().parent
        nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=nearest):
            return f"{folder}, can be written"
    except (OSError, RuntimeError) as error:
        return f"none: {error}, so {lost}"


def _cores() -> str:
    import os

    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, cores = torch.get_num_threads(), os.cpu_count() or usable
    cores_text = f"{usable} of {cores} for this process, {threads} thread{'s' * (threads != 1)} of torch"
    if usable == 1:
        return f"{cores_text}: everything runs on one core"
    if threads < usable:
        return f"{cores_text}: see OMP_NUM_THREADS and torch.set_num_threads to use more"
    return cores_text


def examine(device: str) -> dict[str, Any]:
    """The report as plain data."""
    from ..kernels.registry import explain
    from .bench.measure import facts, installed, memory_of

    free, total = memory_of(device)
    # First of all: it builds the C++ kernel, and the backends are those after that.
    around = surroundings()
    calls = {what: typical_call(device, **settings) for what, settings in TYPICAL.items()}
    explained = {what: explain(call) for what, call in calls.items()}
    packages = ("flash-attn-4", "numpy", "matplotlib", "transformers", "safetensors")
    return {
        "machine": {"kind": device, **facts(device)},
        "memory": {"free": free, "total": total},
        "surroundings": around,
        "packages": {name: installed(name) for name in packages},
        "backends": [
            {"name": name, "ready": reason is None, "why_not": reason}
            for name, reason in next(iter(explained.values())).items()
        ],
        "typical_calls": [
            {
                "what": what,
                "call": call.describe(),
                "pattern": TYPICAL[what]["pattern"],
                "backend": explained[what].backend,
                "because": explained[what].because,
                "density": call.plan.density,
            }
            for what, call in calls.items()
        ],
    }


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    from .html_page import readable_bytes

    machine, memory = report["machine"], report["memory"]
    print_title("Machine")
    where = (
        machine["device"]
        if machine["threads"] is None
        else f"{machine['device']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    )
    versions = {name: machine[name] for name in ("python", "torch", PACKAGE)} | report["packages"]
    print_pairs(
        [
            (machine["kind"], where),
            ("memory", f"{readable_bytes(memory['free'])} free of {readable_bytes(memory['total'])}"),
            ("versions", ", ".join(f"{name} {number}" for name, number in versions.items() if number)),
            ("not installed", ", ".join(name for name, number in versions.items() if not number) or "nothing"),
        ]
    )
    print_title("Environment")
    print_pairs(report["surroundings"].items())
    print_title("Backends, for the first of the calls below")
    print_pairs((backend["name"], backend["why_not"] or "ready") for backend in report["backends"])
    print_title('Backend that backend="auto" selects')
    print_table(
        ("call", "pattern", "shape", "density", "backend"),
        [
            (call["what"], call["pattern"], call["call"], f"{call['density']:.2%}", call["backend"] or "none")
            for call in report["typical_calls"]
        ],
        right=(3,),
    )
    print(f"\nBackends are tried in the order of measurements: {report['typical_calls'][0]['because']}.")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = Parser("dap doctor", "Machine, versions, state of every backend, and the backend of three typical calls.")
    parser.device()
    parser.json()
    options = parser.read(arguments)
    report = examine(device_of(options.device))
    print_json(report) if options.json else show(report)
    return 0


if __name__ == "__main__":
    leave(main)
