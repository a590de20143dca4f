"""Atomic writes, and the folder for cached files."""

from __future__ import annotations

import glob
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:
    # Windows: partial files are not told from those being written, and stay.
    fcntl = None

PARTIAL = ".partial"
"""Suffix of a file that is being written."""
SETTLED_S = 60.0
"""Seconds without a change after which an unlocked partial file is abandoned."""


def cache_folder() -> Path:
    """The user's cache folder for this library; a relative `XDG_CACHE_HOME` is ignored, as its specification says."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "dilated_attention_pytorch"


def write_whole(place: Path, write: Callable[[str], object]) -> None:
    """Write a file beside `place` with `write`, then rename it: readers see the old file or the new one.

    After an error the old file stays and the partial one is removed. The next write removes that of a killed process.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(place)
    temporary = str(place.with_name(f".{place.name}.{secrets.token_hex(4)}{PARTIAL}"))
    # The kernel applies the umask; reading it here would change it for other threads.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    _lock(handle)
    try:
        try:
            write(temporary)
            # Opened again, since a linker writes a new file; Windows flushes only files open for writing.
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        finally:
            os.close(handle)  # Windows replaces no file that is open.
        os.replace(temporary, place)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _lock(handle: int) -> bool:
    """Lock an open file for as long as its writer lives, without waiting; False where that is not possible."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _remove_abandoned(place: Path) -> None:
    """Remove partial files of `place` whose writers were killed.

    Locked files, files younger than `SETTLED_S` and files that are not regular or not this user's stay.
    """
    if fcntl is None:
        return
    for path in place.parent.glob(f".{glob.escape(place.name)}.*{PARTIAL}"):
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            found = os.fstat(handle)
            own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if own and time.time() - found.st_mtime > SETTLED_S and _lock(handle):
                path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def make_private(folder: Path) -> None:
    """Create a folder and missing ones above it for the owner alone; close it where others can write to it."""
    for place in (*reversed(folder.parents), folder):
        place.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_mode & 0o022:
        folder.chmod(0o700)
