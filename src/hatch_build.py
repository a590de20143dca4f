"""Build hook: with `DAP_PREBUILT=1` a wheel for Linux holds the compiled C++ kernel, otherwise it is pure Python.

`DAP_PREBUILT_MACHINE=aarch64 CXX=aarch64-linux-gnu-g++` compiles for another machine.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyrefly: ignore[missing-import]

PLACE = "dilated_attention_pytorch/kernels/cpu"


class PrebuiltKernel(BuildHookInterface):
    """Compile the kernel for every level of a machine, into the wheel alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("DAP_PREBUILT", "0") in ("", "0"):
            return
        source = Path(self.root, "src", PLACE, "toolchain.py")
        spec = importlib.util.spec_from_file_location("toolchain", source)
        assert spec is not None and spec.loader is not None
        toolchain = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(toolchain)
        machine = os.environ.get("DAP_PREBUILT_MACHINE", platform.machine())
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        made = toolchain.build_for_wheel(os.environ.get("CXX", "g++"), folder, machine)
        major, minor = toolchain.glibc_of(made)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{major}_{minor}_{machine}"
        for library in made:
            library.chmod(0o644)
            build_data["force_include"][str(library)] = f"{PLACE}/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
