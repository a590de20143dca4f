"""The first minutes with the installed library: its place, README's examples, the build of the C++ kernel."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from installed import PYTHON, ROOT, python

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_library_is_the_installed_one(tmp_path: Path):
    code = "import sys, dilated_attention_pytorch as dap; print(dap.__file__, sys.prefix, sep='\\n')"
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    file, prefix = map(Path, done.stdout.split())
    if "DAP_INSTALLED_PYTHON" in os.environ:
        assert file.is_relative_to(prefix) and not file.is_relative_to(ROOT / "src"), file
        assert PYTHON.is_relative_to(prefix)


@pytest.mark.slow
def test_readme_runs_and_announces_the_build(tmp_path: Path):
    """One line of stderr tells a user of the CPU that a kernel is compiled; later processes print nothing."""
    program = tmp_path / "readme.py"
    program.write_text("\n".join(BLOCK.findall((ROOT / "README.md").read_text())))
    first = python(program, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert first.returncode == 0, first.stderr
    if shutil.which(os.environ.get("CXX", "g++")):
        assert first.stderr.count("building the C++ kernel") == 1
        code = "import torch, dilated_attention_pytorch as dap; q = torch.randn(1, 1, 64, 16); dap.attention(q, q, q, 'causal')"
        assert python(code, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")).stderr == ""
