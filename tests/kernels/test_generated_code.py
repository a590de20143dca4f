"""A few kernels compile to the recorded code. An intended change needs a GPU run, and then a new record."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import generated_code

triton = pytest.importorskip("triton")

PTX = """\
//
.version 8.7
.visible .entry some_kernel(
	.param .u64 .ptr .global .align 1 some_kernel_param_0,
	.param .u32 some_kernel_param_1
)
{
	.loc	1 20 3                          // forward.py:20:3
	ld.param.u32 	%r1, [some_kernel_param_1];
$L__tmp0:
	ret;
}
	.file	1 "/somewhere/forward.py"
	.section	.debug_abbrev
	{
.b8 1                                   // Abbreviation Code
	}
"""


def test_names_lines_and_comments_do_not_count():
    renamed = PTX.replace("some_kernel", "other_kernel").replace("1 20 3", "1 21 3").replace("Code", "Word")
    plain, other = (generated_code.normalized(x, x.split("entry ")[1].split("(")[0]) for x in (PTX, renamed))
    assert plain == other and "ld.param.u32" in plain
    assert "debug" not in plain and ".b8" not in plain and ".loc" not in plain and "tmp0" not in plain
    assert generated_code.normalized(PTX.replace("%r1", "%r2"), "some_kernel") != plain


def launch(name, code, grid="1,1,1", **arguments):
    return {"kernel": name, "hash": code, "arguments": arguments, "launch": {"grid": grid}}


def test_launches_are_matched_in_order():
    last = [launch("a", "1"), launch("b", "2", N="4"), launch("c", "3"), launch("z", "9")]
    present = [launch("a", "1", "2,1,1"), launch("b", "5", N="8"), launch("c", "3"), launch("d", "9"), launch("e", "1")]
    lines = generated_code.compared(last, present, dict.fromkeys("1239", "known"))
    assert [line["code"] for line in lines] == ["identical", "changed", "identical", "identical", "known"]
    assert [line.get("launch") for line in lines[:3]] == [["grid"], "identical", "identical"]
    assert lines[1]["differs"] == ["N: 4 -> 8"]
    assert [line["code"] for line in generated_code.compared(last, present[:1], {})] == ["identical", *["gone"] * 3]


@pytest.mark.parametrize(
    "calls", [generated_code.QUICK[:1], pytest.param(generated_code.QUICK[1:], marks=pytest.mark.slow)], ids=", ".join
)
def test_kernels_compile_to_the_recorded_code(calls):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler named cc, which builds the stub driver")
    known = json.loads(generated_code.HASHES.read_text()).get(triton.__version__)
    if known is None:
        pytest.skip(f"no code is recorded for triton {triton.__version__}; generated_code.py --write records it")
    advice = "run benchmarks/gpu_stamp.py on a GPU, then record it with benchmarks/generated_code.py --write"
    assert generated_code.quick_hashes(calls) == {call: known[call] for call in calls}, advice
