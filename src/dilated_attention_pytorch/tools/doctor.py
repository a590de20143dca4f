"""`dap doctor`: the machine, every backend with its reason, and what would be chosen for typical calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .screen import AsJson, Device, Screen, device_of, print_json

if TYPE_CHECKING:
    from ..kernels.registry import AttentionCall

TYPICAL: dict[str, dict[str, Any]] = {
    "LongNet layer, causal": {"pattern": "dilated:1024x1,4096x4 & causal"},
    "block-sparse, grouped key heads": {"pattern": "random:0.1", "key_heads": 2},
    "window with dropout, float64": {"pattern": "window:256", "dropout_p": 0.1, "dtype": "float64"},
}
"""Calls of 4096 tokens, 8 heads of 64, in the usual dtype of the device where none is given."""


def typical_call(
    device: str, pattern: str, *, key_heads: int = 8, dropout_p: float = 0.0, dtype: str | None = None
) -> AttentionCall:
    """A call a backend can be asked about."""
    import torch

    from ..ops.attention import call_of

    kind = getattr(torch, dtype or ("bfloat16" if device == "cuda" else "float32"))
    query = torch.zeros(1, 8, 4096, 64, device=device, dtype=kind)
    key = query[:, :key_heads]
    seed = torch.zeros(1, dtype=torch.int64, device=device) if dropout_p else None
    return call_of(query, key, key, None, None, seed, pattern, False, 0.125, dropout_p, "auto")[0]


def examine(device: str) -> dict[str, Any]:
    """All that is told, as plain data."""
    from ..kernels.registry import explain
    from .measure import facts, installed, memory_of

    free, total = memory_of(device)
    calls = {what: typical_call(device, **wanted) for what, wanted in TYPICAL.items()}
    explained = {what: explain(call) for what, call in calls.items()}
    packages = ("flash-attn-4", "numpy", "typer", "rich", "matplotlib", "transformers", "safetensors")
    return {
        "machine": {"kind": device, **facts(device)},
        "memory": {"free": free, "total": total},
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


def show(found: dict[str, Any]) -> None:
    """Print what was found."""
    from .measure import readable_bytes

    screen, machine, memory = Screen(), found["machine"], found["memory"]
    screen.title("Machine")
    where = machine["device"] if machine["threads"] is None else f"{machine['device']}, {machine['threads']} threads"
    versions = {name: machine[name] for name in ("python", "torch", "triton")} | found["packages"]
    screen.pairs(
        [
            (machine["kind"], where),
            ("memory", f"{readable_bytes(memory['free'])} free of {readable_bytes(memory['total'])}"),
            ("versions", ", ".join(f"{name} {number}" for name, number in versions.items() if number)),
            ("not installed", ", ".join(name for name, number in versions.items() if not number) or "nothing"),
        ]
    )
    screen.title("Backends, asked about the first of the calls below")
    screen.pairs((backend["name"], backend["why_not"] or "ready") for backend in found["backends"])
    screen.title('What backend="auto" takes')
    screen.table(
        ("call", "pattern", "shape", "density", "backend"),
        [
            (call["what"], call["pattern"], call["call"], f"{call['density']:.2%}", call["backend"] or "none")
            for call in found["typical_calls"]
        ],
        right=(3,),
    )
    screen.text(f"The order follows measurements where there are any: {found['typical_calls'][0]['because']}.")


def command(device: Device = "auto", as_json: AsJson = False) -> None:
    """What this machine can run, why not the rest, and what would be chosen for three typical calls."""
    found = examine(device_of(device))
    print_json(found) if as_json else show(found)
