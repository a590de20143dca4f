"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(place: Path, write: Callable[[str], object]) -> None:
    """Let `write` fill a file beside `place`, then put it there in one step: readers see the old or the new one.

    Folders on the way are made. Where anything fails, what was there stays and nothing is left beside it.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    os.close(handle)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        # mkstemp lets nobody else read; what is written here are ordinary files.
        os.umask(mask := os.umask(0))
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, place)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
