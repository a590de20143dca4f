"""`dap tune`: what dense and sparse attention cost here, measured and kept for the factory and for forecasts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from ..errors import must
from .screen import AsJson, Device, Screen, device_of, print_json


class Action(StrEnum):
    """What to do with the stored figures."""

    calibrate = "calibrate"
    show = "show"
    clear = "clear"


def stored() -> dict[str, Any]:
    """The file and the figures in it, as plain data."""
    from dataclasses import asdict

    from ..nn.tuning import cache_path, stored_models

    return {"file": str(cache_path()), "models": {key: asdict(model) for key, model in stored_models().items()}}


def command(
    action: Annotated[Action, typer.Argument(help="calibrate measures again, show reads, clear forgets.")] = (
        Action.calibrate
    ),
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure what dense and sparse attention cost here (seconds), show what is stored, or clear it."""
    from ..nn.tuning import cache_path, calibrate, known_model

    if action == Action.calibrate:
        where = device_of(device)
        if calibrate(where) != known_model(where):
            what, advice = "figures must go to a file that can be written", "Name another folder in XDG_CACHE_HOME."
            raise must(what, cache_path(), advice)
    elif action == Action.clear:
        cache_path().unlink(missing_ok=True)
    found = stored()
    if as_json:
        print_json(found)
        return
    screen = Screen()
    screen.text(f"{found['file']}{'' if found['models'] else ' holds no figures'}")
    if found["models"]:
        names = ("dense_call", "dense_tile", "sparse_call", "sparse_tile")
        screen.table(
            ("machine", *(name.replace("_", " ") + ", us" for name in names)),
            [(key, *(f"{1e6 * model[name]:.1f}" for name in names)) for key, model in found["models"].items()],
            right=(1, 2, 3, 4),
        )
