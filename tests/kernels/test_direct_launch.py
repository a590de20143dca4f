"""Direct launches equal those of Triton's own launcher, byte for byte, on a stub of the CUDA driver.

The installed release of Triton is tested; `DAP_TRITON_RELEASES` names folders with further releases (`pip install
--no-deps --target FOLDER triton==3.7.*`), separated as in PATH. `python -m kernels.test_direct_launch` prints the host
time of launches for all of them.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
INSTALLED = ""
RELEASES = [INSTALLED, *filter(None, os.environ.get("DAP_TRITON_RELEASES", "").split(os.pathsep))]
SCENES = ["triton window", "triton ladder", "hopper window", "hopper ladder", "hopper ladder, widths 80 and 96"]
SCENES += ["hopper padding"]
SCENES += ["learned blocks", "learned tokens", "index tensors"]
OVERLAP = "6:01000000;"
"""Attribute of a launch that may start before the launch in front of it has ended."""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("direct launches")]


def program_output(release, folder, *arguments):
    """Output of `stub_launches.py` with a release of Triton, on a stub driver that is built in `folder`."""
    package = Path(release) / "triton" if release else Path(find_spec("triton").origin).parent
    headers = package / "backends" / "nvidia" / "include"
    build = ["-O1", "-shared", "-fPIC", f"-I{headers}", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
    subprocess.run([shutil.which("cc"), TESTS / "kernels" / "stub_cuda.c", *build], check=True)
    paths = [release] * bool(release) + [str(TESTS.parent / "src"), str(TESTS)]
    stub = {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder), "TRITON_CACHE_DIR": str(folder)}
    environment = os.environ | stub | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # Parameters and launch attributes are those of the intermediate representation before LLVM optimizes it.
    environment["DISABLE_LLVM_OPT"] = "1"
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, TESTS / "kernels" / "stub_launches.py", *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: Path(release).name or "installed")
def output(request, tmp_path_factory):
    """Output of one process for all scenes: compiled kernels, Triton's driver and imports are shared."""
    if find_spec("triton") is None:
        pytest.skip("needs triton, which is not installed")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler named cc, which builds the stub driver and Triton's own")
    return program_output(request.param, tmp_path_factory.mktemp("stub"), *SCENES)


def assert_equal_launches(launches):
    assert launches
    for launch in launches:
        own, direct = launch["own"], launch["direct"]
        records = []
        for record, overlaps in zip(own["records"], launch["overlaps"], strict=True):
            head, attributes, parameters = record.replace("attributes=", "\n").replace(" parameters=", "\n").split("\n")
            # Triton's own launcher never overlaps launches of a sequence.
            attributes += OVERLAP * (overlaps and OVERLAP not in attributes)
            records.append(f"{head}attributes={attributes} parameters={parameters}")
        assert direct["records"] == records
        # Both ways were taken: hooks see every launch of Triton's own launcher, which makes no direct launch.
        assert own["own"] == own["hooked"] == len(records) > 0
        assert direct["own"] == 0


@pytest.mark.parametrize("scene", SCENES)
def test_direct_launches_equal_tritons_own(output, scene):
    assert_equal_launches(output["scenes"][scene])


def test_launches_of_one_sequence_overlap(output):
    assert any(OVERLAP in record for record in output["scenes"]["hopper ladder"][0]["direct"]["records"])


def test_a_direct_launch_outlives_tritons_cache(output):
    assert output["outlives_triton_cache"]


def main() -> None:
    """Print host microseconds of the launches of every scene, through Triton's own launcher and directly."""
    import tempfile

    for release in RELEASES:
        with tempfile.TemporaryDirectory() as folder:
            output = program_output(release, Path(folder), *SCENES, "--time")
        for name, launches in output["scenes"].items():
            own, direct = (sum(launch["us"][way] for launch in launches) for way in ("own", "direct"))
            count = sum(len(launch["direct"]["records"]) for launch in launches)
            print(f"triton {output['triton']}  {name:15} {count:2} launches  own {own:7.1f}  direct {direct:6.1f} us")


if __name__ == "__main__":
    main()
