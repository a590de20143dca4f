"""The layout for Hugging Face's `kernels`: built, then imported from its folder in a process without the package."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOAD = """
import importlib.util, json, sys
from pathlib import Path
# `kernels` imports a variant by path, under a name of its own; the installed package stays out of reach.
sys.modules["dilated_attention_pytorch"] = {blocked}
spec = importlib.util.spec_from_file_location({name!r}, {file!r})
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import torch
query = torch.randn(1, 2, 100, 16, dtype=torch.float64, requires_grad=True)
output = module.attention(query, query, query, "window:8 & causal")
output.sum().backward()
near = torch.arange(100)[:, None] - torch.arange(100)
wanted = torch.nn.functional.scaled_dot_product_attention(query, query, query, (near >= 0) & (near <= 8))
assert torch.allclose(output, wanted) and query.grad is not None
assert module.LongNetLM.__module__.startswith({package!r}), module.LongNetLM.__module__
for name in module.__all__ if hasattr(module, "__all__") else ():
    getattr(module, name)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    done = subprocess.run([sys.executable, ROOT / "src" / "hub_kernel.py", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == folder / "build" / "torch-universal"
    return folder


def load(folder: Path, **how: str) -> None:
    done = subprocess.run([sys.executable, "-I", "-c", LOAD.format(**how)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_variant_is_imported_from_its_folder(repository: Path):
    variant = repository / "build" / "torch-universal"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "dap-attention" and metadata["id"].isidentifier() and metadata["license"] == "MIT"
    load(repository, name=metadata["id"], file=str(variant / "__init__.py"), package=metadata["id"], blocked="None")


def test_older_releases_import_the_named_folder(repository: Path):
    file = repository / "build" / "torch-universal" / "dap_attention" / "__init__.py"
    how = {"package": "dilated_attention_pytorch", "blocked": "None"}
    load(repository, name="dap_attention", file=str(file), **how)


def test_a_repository_is_not_overwritten(repository: Path):
    again = subprocess.run([sys.executable, ROOT / "src" / "hub_kernel.py", repository], capture_output=True, text=True)
    assert again.returncode == 1 and "exists; remove it" in again.stderr


@pytest.mark.skipif(find_spec("kernels.importer") is None, reason="Hugging Face's kernels is not installed")
def test_kernels_loads_the_repository(repository: Path):
    from kernels import get_local_kernel

    assert str(get_local_kernel(repository).parse("window:8 & causal")) == "window:8 & causal"
