"""`dap tune`: cost of dense and sparse attention on this machine, stored for the factory and for forecasts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import must
from .console import Parser, device_of, leave, one_of, print_json, print_table

if TYPE_CHECKING:
    from ..nn.calibration import CostModel

HEADS = 8
SHARES = (0.5, 0.25, 0.1)
"""Densities of the conclusion."""
LENGTHS = [2**power for power in range(8, 21)]


def stored() -> dict[str, Any]:
    """The file of costs and its contents, as plain data."""
    from ..nn.calibration import cache_path, stored_models

    return {"file": str(cache_path()), "models": {key: asdict(model) for key, model in stored_models().items()}}


def conclusion(model: CostModel) -> list[str]:
    """Lengths from which sparse attention is faster than dense, by the stored costs."""
    from ..nn.calibration import TILE
    from .html_page import tokens_text

    def speedup(n: int, share: float) -> float:
        tiles = HEADS * (n / TILE) ** 2
        dense = model.dense_call + model.dense_tile * tiles
        return dense / (model.sparse_call + model.sparse_tile * share * tiles)

    lines = []
    for share in SHARES:
        faster = next((n for n in LENGTHS if speedup(n, share) > 1), None)
        far = f"{speedup(2**16, share):.1f}x as fast at 64K"
        when = f"from {tokens_text(faster)} tokens, {far}" if faster else f"at no length up to 1M tokens ({far})"
        lines.append(f"{share:.0%} of the tiles: faster than dense {when}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = Parser(
        "dap tune",
        "Measure the costs of dense and sparse attention on this machine in a few seconds, or show or clear them.",
        "[calibrate|show|clear]",
    )
    actions = ("calibrate", "show", "clear")
    text = "calibrate measures again, show prints the stored costs, clear removes them"
    parser.option("action", read=one_of(actions), nargs="?", default="calibrate", metavar="ACTION", help=text)
    parser.device()
    parser.json()
    options = parser.read(arguments)
    from ..nn.calibration import cache_path, calibrate, stored_model, stored_models

    if options.action == "calibrate":
        where = device_of(options.device)
        if calibrate(where) != stored_model(where):
            what, advice = "figures must go to a file that can be written", "Name another folder in XDG_CACHE_HOME."
            raise must(what, cache_path(), advice)
    elif options.action == "clear":
        cache_path().unlink(missing_ok=True)
    models = stored()
    if options.json:
        print_json(models)
        return 0
    print(f"{models['file']}{'' if models['models'] else ' has no costs yet; `dap tune` measures them'}")
    for key, model in stored_models().items():
        print(f"\n{key}, forward, {HEADS} heads of 64")
        rows = [
            (name, f"{1e6 * call:.1f}", f"{1e6 * tile:.1f}")
            for name, call, tile in (
                ("dense", model.dense_call, model.dense_tile),
                ("sparse", model.sparse_call, model.sparse_tile),
            )
        ]
        print_table(("", "us per call", "us per tile of 128 x 128"), rows, right=(1, 2))
        for line in conclusion(model):
            print(f"> {line}")
    return 0


if __name__ == "__main__":
    leave(main)
