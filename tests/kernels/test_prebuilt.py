"""The native library of wheels: built per processor level, equal to the reference, rejected if others can write it."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import Problem
from oracle import error

from dilated_attention_pytorch import make_plan
from dilated_attention_pytorch.kernels import reference
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu import native, toolchain

# The libraries of all levels, six seconds of compilation, are built in one worker.
pytestmark = pytest.mark.xdist_group("prebuilt")
MACHINE = platform.machine()
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or MACHINE not in toolchain.LEVELS, reason="no g++, or a machine without wheels"
)
PROBLEM = Problem(
    name="", text="dilated:64x1,128x3 & causal", n=230, heads=6, key_heads=3, d=24, e=40, batch=2, padded=(230, 100)
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    made = toolchain.build_for_wheel("g++", folder, MACHINE)
    for path in made:
        path.chmod(0o644)
    return {path.name.split("-")[2]: path for path in made}


@pytest.fixture
def prebuilt(libraries, monkeypatch):
    """Load the library of a level as if the package held it."""

    def use(level: str):
        monkeypatch.setattr(native, "_prebuilt", lambda: libraries[level])
        monkeypatch.setattr(toolchain, "level_here", lambda: level)
        monkeypatch.setattr(native, "library_path", native.library_path.__wrapped__)
        monkeypatch.setattr(native, "_library", native._library.__wrapped__)
        return libraries[level]

    monkeypatch.delenv(native.PREBUILT, raising=False)
    monkeypatch.delenv("DAP_NATIVE_FLAGS", raising=False)
    return use


@needs_compiler
@pytest.mark.parametrize("level", toolchain.LEVELS.get(MACHINE, {}))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_level_matches_the_reference(prebuilt, level, dtype):
    if not toolchain.LEVELS[MACHINE][level][1] <= set(toolchain.processor_flags().split()):
        pytest.skip(f"this processor has no {level}")
    assert prebuilt(level) == native.library_path() and native.why_not_prebuilt() is None
    assert f"prebuilt for {MACHINE} with {level}" in native.which_library()
    inputs = PROBLEM.inputs(dtype)
    plan = make_plan(PROBLEM.pattern, PROBLEM.n, PROBLEM.heads, block_size=PROBLEM.block_size)
    call = AttentionCall(*inputs[:3], plan, PROBLEM.d**-0.5, PROBLEM.key_padding_mask(), pattern=PROBLEM.pattern)
    bias = torch.linspace(-1, 2, PROBLEM.heads * 21, dtype=call.compute_dtype).view(-1, 21).sin()
    call = replace(call, dropout_p=0.2, seed=torch.tensor([7]), softcap=1.5, bias=bias)
    found, wanted = [], []
    for module, results in ((native, found), (reference, wanted)):
        output, lse = module.forward(call)
        grads = module.backward(call, output, lse, inputs.grad_output, inputs.grad_lse)
        results += [output, lse, *grads, grads.bias]
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) <= bound


@needs_compiler
def test_libraries_need_an_old_glibc_and_no_cxx_runtime(libraries):
    assert toolchain.glibc_of(list(libraries.values())) == (2, 17)
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    for path in libraries.values():
        headers = subprocess.run(["objdump", "-p", path], capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"NEEDED +(\S+)", headers)) == {"libc.so.6", "libm.so.6"}
        symbols = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True).stdout
        own = [line.split()[-1] for line in symbols.splitlines() if " .text" in line]
        exported = {f"{what}_{kind}" for what in ("forward", "backward", "best_match") for kind in ("float", "double")}
        assert set(own) == exported | {"choose_blocks", "call_bytes"}


def checked(compiler: str, library: Path, folder: Path, *runner: str) -> str:
    """Output of native_check.cpp, which calls a library through its C interface, without Python."""
    program = folder / "native_check"
    source, headers = Path(__file__).with_name("native_check.cpp"), Path(native.__file__).parent
    flags = ["-std=c++17", "-O1", "-fopenmp", f"-I{headers}", "-Wl,--no-as-needed", "-lgomp", "-ldl"]
    subprocess.run([compiler, str(source), "-o", str(program), *flags], check=True)
    return subprocess.run([*runner, program, library], capture_output=True, text=True, check=True).stdout


@needs_compiler
@pytest.mark.parametrize("level", toolchain.LEVELS.get(MACHINE, {}))
def test_c_interface_works_without_python(libraries, level, tmp_path):
    if not toolchain.LEVELS[MACHINE][level][1] <= set(toolchain.processor_flags().split()):
        pytest.skip(f"this processor has no {level}")
    assert checked("g++", libraries[level], tmp_path).count("largest difference") == 2


@pytest.mark.skipif(MACHINE == "aarch64", reason="runs here without an emulator")
def test_aarch64_library_runs_under_an_emulator(tmp_path):
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        pytest.skip(f"needs {compiler} and {emulator}")
    (library,) = toolchain.build_for_wheel(compiler, tmp_path, "aarch64")
    found = checked(compiler, library, tmp_path, emulator, "-L", "/usr/aarch64-linux-gnu")
    assert found.count("largest difference") == 2


@needs_compiler
def test_prebuilt_library_that_others_can_write_is_refused(prebuilt, tmp_path, monkeypatch):
    level = next(iter(toolchain.LEVELS[MACHINE]))
    copy = tmp_path / "native.so"
    shutil.copy(prebuilt(level), copy)
    monkeypatch.setattr(native, "_prebuilt", lambda: copy)
    assert native.why_not_prebuilt() is None
    copy.chmod(0o666)
    assert "writable by its owner alone" in native.why_not_prebuilt()
    assert native.library_path() == native.local_path()
    assert "built on this machine" in native.which_library()


@needs_compiler
def test_damaged_prebuilt_library_leaves_the_local_one(prebuilt, tmp_path, monkeypatch):
    damaged = tmp_path / "native.so"
    damaged.write_bytes(b"not a library")
    damaged.chmod(0o644)
    prebuilt(next(iter(toolchain.LEVELS[MACHINE])))
    monkeypatch.setattr(native, "_prebuilt", lambda: damaged)
    assert native.why_not_prebuilt().startswith("cannot be loaded (")
    assert native.library_path() == native.local_path()


@pytest.mark.parametrize(
    ("machine", "flags", "level"),
    [
        ("x86_64", " ".join(sorted(toolchain.V4)), "avx512"),
        ("x86_64", " ".join(sorted(toolchain.V3)), "avx2"),
        ("x86_64", "sse4_2 avx", None),
        ("x86_64", " ".join(sorted(toolchain.V4 - {"avx512bw"})), "avx2"),
        ("aarch64", "fp asimd", "neon"),
        ("riscv64", "", None),
    ],
)
def test_processor_flags_choose_the_level(machine, flags, level, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(toolchain, "processor_flags", lambda: f"flags\t: {flags}")
    assert toolchain.level_here() == level


@pytest.mark.parametrize("name", [native.PREBUILT, "DAP_NATIVE_FLAGS"])
def test_environment_turns_the_prebuilt_library_off(name, monkeypatch):
    monkeypatch.setenv(name, "0" if name == native.PREBUILT else "-g1")
    assert name in native.why_not_prebuilt()


def test_other_sources_have_another_name(monkeypatch, tmp_path):
    before = toolchain.wheel_name("x86_64", "avx2")
    assert re.fullmatch(r"native-x86_64-avx2-[0-9a-f]{16}\.so", before)
    for source in toolchain.SOURCES:
        shutil.copy(Path(native.__file__).with_name(source), tmp_path)
    monkeypatch.setattr(toolchain, "__file__", str(tmp_path / "toolchain.py"))
    assert toolchain.wheel_name("x86_64", "avx2") == before
    (tmp_path / "native.cpp").write_text("// another")
    assert toolchain.wheel_name("x86_64", "avx2") != before
