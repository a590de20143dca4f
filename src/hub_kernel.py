"""Lay the package out as a kernel repository for Hugging Face's `kernels`: `python src/hub_kernel.py FOLDER`.

The repository has one variant, `torch-universal`: Python and Triton sources without compiled code, for every system.
`kernels.get_local_kernel(FOLDER)` loads it. One process loads one copy of the package: its torch operators have fixed
names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "dilated_attention_pytorch"
NAME = "dap-attention"
KEPT = ("*.py", "*.pyi", "*.cpp", "*.h", "*.json", "*.html", "py.typed")
"""Files of the package."""


def lay_out(folder: Path) -> Path:
    """Write the repository into `folder`, which must not have a build yet; returns the variant."""
    variant = folder / "build" / "torch-universal"
    if variant.exists():
        raise SystemExit(f"{variant} exists; remove it or choose another folder")
    digest = hashlib.sha256()
    for path in sorted(path for pattern in KEPT for path in SOURCE.rglob(pattern)):
        target = variant / path.relative_to(SOURCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        digest.update(path.read_bytes())
    version = re.search(r'__version__ = "(\d+)\.(\d+)\.(\d+)"', (SOURCE / "__init__.py").read_text())
    assert version is not None
    # A module of this name holds the package, so it must be an identifier that no other version has.
    identifier = f"{NAME.replace('-', '_')}_universal_{digest.hexdigest()[:12]}"
    metadata = {
        "id": identifier,
        "name": NAME,
        "version": int(version[1]),
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    # Older releases of `kernels` import a folder with the name of the repository.
    older = variant / NAME.replace("-", "_")
    older.mkdir()
    (older / "__init__.py").write_text(OLDER)
    return variant


OLDER = '''"""The package in the folder above, for older releases of `kernels`."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("dilated_attention_pytorch", Path(__file__).parents[1] / "__init__.py")
_package = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_package)


def __getattr__(name):
    return getattr(_package, name)
'''


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the repository")
    print(lay_out(parser.parse_args().folder))
