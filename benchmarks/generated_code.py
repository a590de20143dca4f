"""Compare the code that GPU kernels compile to with that of the sources which last ran on a GPU.

    python benchmarks/generated_code.py --last COMMIT --measured COMMIT --triton FOLDER
    python benchmarks/generated_code.py --check
    python benchmarks/generated_code.py --write

Representative calls run in both trees on a stub of the CUDA driver (tests/kernels/stub_cuda.c), which records every
launch. Nothing is computed, and no GPU is needed. PTX for compute capability 9.0 is compared without comments, line
numbers and the name of the kernel, together with the flags of the assembler. A line of the result is a launch:

    code     "identical"; "known", as another launch of the last tree; "measured", as a launch of the tree of
             `--measured`; "changed"; "new"; "gone"
    launch   "identical", or which of grid, block, shared memory, parameters and tables differ. Parameters are compared
             by value, pointers by alignment, and tables (of calls with a pattern) by content
    differs  compile-time constants and types of arguments that differ where the code changed

`--last` is the commit of gpu_stamp.json, on which the smoke tests passed. `--measured` is a later commit of which a GPU
ran calls with patterns, so that only those count, or an earlier result that was compared with it: its lines "measured"
keep the hashes of a commit that is not in the history. FOLDER has the Triton release of the last run: `pip install
--no-deps --target FOLDER triton==3.6.0`. Default is the installed one. `--check` compares the calls QUICK with the
hashes that `--write` recorded for the installed release in benchmarks/results/generated_code.json: a change of these
kernels shows there and must be run on a GPU. DAP_PTX=FOLDER keeps the PTX of all trees there, for the assembler.
`--last` needs git; all need a C compiler, torch and triton.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dilated_attention_pytorch"
RESULTS = ROOT / "benchmarks" / "results"
HASHES, STAMP = RESULTS / "generated_code.json", RESULTS / "gpu_stamp.json"
PROCESSORS = 132
QUICK = ("triton window", "hopper window", "selected causal tokens of 128")
"""Calls of `--check`."""


# The recording process: it imports the package of the tree that PYTHONPATH names, which may have either layout.


def found(*names: str) -> Any:
    """The first of some modules of the package that exists."""
    for name in names:
        try:
            return importlib.import_module(f"{PACKAGE}.{name}")
        except ModuleNotFoundError as problem:
            if not str(problem.name).startswith(PACKAGE):
                raise
    raise ModuleNotFoundError(names)


class Recorder:
    """Launches on the stub driver, with the compiled code of each."""

    def __init__(self) -> None:
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.compiler.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        self.stub: Any = ctypes.CDLL("libcuda.so.1")
        self.stub.stub_records.restype = ctypes.c_char_p
        self.code: dict[str, dict[str, Any]] = {}
        """By the identifier of an image: what it was compiled from."""
        self._source = threading.local()
        for kind in (ASTSource, GluonASTSource):
            kind.make_ir = self._noting(kind.make_ir)
        CUDABackend.make_cubin = lambda backend, ptx, metadata, options, *_: self._image(ptx, options)

    def _noting(self, make_ir: Callable[..., Any]) -> Callable[..., Any]:
        def make(source: Any, *given: Any, **named: Any) -> Any:
            self._source.value = source
            return make_ir(source, *given, **named)

        return make

    def _image(self, ptx: str, options: Any) -> bytes:
        source = self._source.value
        names, body = source.fn.arg_names, normalized(ptx, source.fn.fn.__name__)
        constants = {names[place[0]]: repr(value) for place, value in source.constants.items()}
        types = {name: str(kind) for name, kind in source.signature.items() if kind != "constexpr"}
        flags = f"{options.enable_fp_fusion} {options.num_warps} {getattr(options, 'ptx_options', None)}"
        identifier = hashlib.sha256((body + flags + repr((source.fn.fn.__name__, constants, types))).encode())
        self.code[identifier.hexdigest()[:16]] = {
            "kernel": source.fn.fn.__name__,
            "hash": hashlib.sha256((body + flags).encode()).hexdigest(),
            "arguments": constants | types,
            "pointers": [" .ptr " in line for line in re.findall(r"\.param .*", ptx.split(")")[0])],
        }
        if folder := os.environ.get("DAP_PTX"):
            (Path(folder) / f"{source.fn.fn.__name__}.{identifier.hexdigest()[:16]}.ptx").write_text(ptx)
        # The stub reads parameters from PTX, and the identifier from its first line.
        return f"//{identifier.hexdigest()[:16]}\n{ptx}".encode()

    def launches(self, call: Callable[[], object]) -> dict[str, Any]:
        """Launches of a call, up to its error if it has one. A call with a pattern returns what holds its tables."""
        self.stub.stub_clear()
        held, error = None, {}
        try:
            held = call()
        except Exception as problem:
            # The last tree lacks some calls, and cannot compile others.
            error = {"error": f"{type(problem).__name__}: {problem}"[:500]}
        tables = {} if held is None else integer_tensors()
        return error | {"launches": [self._launch(x, tables) for x in self.stub.stub_records().decode().splitlines()]}

    def _launch(self, line: str, tables: dict[int, str]) -> dict[str, Any]:
        fields = dict(word.split("=", 1) for word in line.split(" ")[1:])
        code = self.code[fields["image"]]
        parameters, read = [], []
        for value, is_pointer in zip(fields["parameters"].split(","), code["pointers"], strict=True):
            # A TMA descriptor of the stub begins with an address.
            if is_pointer or len(value) == 256:
                address = int.from_bytes(bytes.fromhex(value[:16]), "little")
                read += [tables[address]] if address in tables else []
                value = f"{address % 16}:{value[16:]}"
            parameters.append(value)
        launch = {name: fields[name] for name in ("grid", "block", "shared")}
        shown = {"launch": launch | {"parameters": parameters, "tables": read}}
        return {key: code[key] for key in ("kernel", "hash", "arguments")} | shown


def integer_tensors() -> dict[int, str]:
    """Hashes of the tensors of integers that exist, by address."""
    import torch

    kinds = torch.int32, torch.int64, torch.uint8
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype in kinds and x.device.type == "cpu"]
    # Of tensors that begin at one address the largest counts.
    ordered = sorted((x for x in tensors if x.numel() and x.is_contiguous()), key=lambda x: x.numel())
    return {x.data_ptr(): hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16] for x in ordered}


def normalized(ptx: str, name: str) -> str:
    """PTX without comments, debug information and the kernel's name."""
    body = re.sub(r"\.section\s+\.debug.*?\n\s*\}", "", ptx, flags=re.DOTALL)
    lines = (re.sub(r"//.*", "", line).strip() for line in body.splitlines())
    kept = (line for line in lines if line and not re.match(r"\.(loc|file)\b|\$L__(tmp|func)", line))
    return re.sub(rf"\b{name}(?=\b|_param)", "kernel", "\n".join(kept))


def zeroed(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor, which then holds zeros."""
    return lambda *given, **options: make(*given, **options).zero_()


def pretend_gpu() -> None:
    """Make Triton compile for the stub's device, and the library run there what it runs on an H200; tensors stay on
    the CPU."""
    import torch
    from triton.runtime import driver

    package = importlib.import_module(PACKAGE)
    for path in Path(package.__path__[0]).rglob("*.py"):
        name = ".".join(path.relative_to(Path(package.__path__[0]).parent).with_suffix("").parts)
        if "/kernels/" in str(path) or "/selection/" in str(path) or path.parent.name in ("ops", "nn", "adaptive"):
            importlib.import_module(name.removesuffix(".__init__"))
    # From here on kernels, which were imported as compiled ones, accept tensors of the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, shared_memory_per_block_optin=232448)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.cuda.get_device_properties = lambda *device: properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_device = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda device: 77
    active: Any = driver.active
    active.get_current_device, active.get_current_stream = lambda: 0, lambda device: 77
    # Kernels do not run, so memory that they would write is made of zeros, which torch can go on with.
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, zeroed(getattr(owner, name)))
    everywhere = {
        "allows_host_sync": lambda device: False,
        "may_read": lambda device: False,
        "device_problem": lambda device: None,
        "launches_overlap": lambda device: True,
    }
    for name, module in [*sys.modules.items()]:
        if name.startswith(PACKAGE):
            for attribute, value in everywhere.items():
                if hasattr(module, attribute):
                    setattr(module, attribute, value)
    backend, lowering = (
        found("kernels.triton.backend", "kernels.triton_backend"),
        found("kernels.triton.lowering", "kernels.triton_schedule"),
    )
    backend.why_not = lambda call: None
    lowering.PROGRAMS_PER_PROCESSOR *= PROCESSORS
    registry = found("kernels.registry")
    preference = registry._preference
    registry._preference = lambda device, *classes: preference(torch.device("cuda"), *classes)


def attend(name: str, pattern: str, **more: Any) -> object:
    """Forward and backward pass of a backend; on Hopper with both ways to sum dQ."""
    import torch

    dap = importlib.import_module(PACKAGE)
    n, heads, keys, d, e = (more.pop(word, size) for word, size in zip("nhkde", (640, 4, 4, 64, None), strict=True))
    dtype, block = getattr(torch, more.pop("dtype", "bfloat16")), more.pop("block", 128)
    plan = dap.make_plan(dap.parse(pattern), n, heads, block_size=block)
    query = torch.zeros(2, n, heads, d, dtype=dtype).transpose(1, 2)
    key, value = (torch.zeros(2, n, keys, width, dtype=dtype).transpose(1, 2) for width in (d, e or d))
    if more.pop("padding", False):
        more["key_padding_mask"] = torch.zeros(2, n, dtype=torch.bool)
    if more.pop("sink", False):
        more["sink"] = torch.zeros(heads)
    if "dropout_p" in more:
        more["seed"] = torch.zeros(1, dtype=torch.int64)
    if width := more.pop("table", None):
        more["bias"] = torch.zeros(heads, *width)
    if axes := more.pop("places", None):
        more["bias_positions"] = torch.zeros(1, n, axes, dtype=torch.int64)
    with torch.autograd.set_detect_anomaly(more.pop("anomaly", False)):
        call = found("kernels.call", "kernels.registry").AttentionCall(query, key, value, plan, 0.125, **more)
        module = found(f"kernels.{name}.backend", f"kernels.{name}_backend")
        for is_reproducible in (True, False) if name == "hopper" else (True,):
            found("kernels.call", "kernels.registry").reproducible_gradients(is_reproducible)
            runner = module.prepare(call)
            output, lse = runner.forward(call)
            runner.backward(call, output, lse, torch.zeros_like(output), torch.zeros_like(lse) if block == 64 else None)
        found("kernels.call", "kernels.registry").reproducible_gradients(True)
    return plan, runner, more


def learn(is_causal: bool, unit: int, n: int = 1024, d: int = 64, **more: Any) -> None:
    """Forward and backward pass of a learned layer: by tokens where causal, else by blocks of queries."""
    import torch

    nn = importlib.import_module(f"{PACKAGE}.nn")
    # What one of the trees has another default for, except for the rows that a scorer learns from.
    options = {"score_unit": unit, "exploration": True, "fitted_start": False} | more.pop("config", {})
    known = nn.AdaptiveConfig.__dataclass_fields__
    config = nn.AdaptiveConfig(**{name: value for name, value in options.items() if name in known})
    dtype, size, keys = getattr(torch, more.pop("dtype", "bfloat16")), more.pop("block", 128), more.pop("keys", 4)
    trains, padding = more.pop("trains", True), more.pop("padding", False)
    layer = nn.BlockSparseAdaptive([n], [1], 4, d, config, block_size=size, **more).train(trains)
    x = [torch.zeros(1, n, heads, d, dtype=dtype, requires_grad=trains) for heads in (4, keys, keys)]
    mask = {"key_padding_mask": torch.zeros(1, n, dtype=torch.bool)} if padding else {}
    output = layer(*x, is_causal, **mask)
    if trains:
        output.sum().backward()


def select(is_causal: bool, granularity: int, per_token: bool, *, packed: bool = False, d: int = 64) -> None:
    """Forward and backward pass of `selected_attention`."""
    import torch

    dap = importlib.import_module(PACKAGE)
    query = torch.zeros(1, 4, 1024, d, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.zeros(1, 2, 1024, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    rows = 1024 if per_token else 1024 // granularity
    indices = torch.zeros(1, 2, rows, 4, dtype=torch.int64)
    more = {"cu_seqlens": torch.tensor([0, 300, 1024], dtype=torch.int32)} if packed else {}
    options = {"granularity": granularity, "is_causal": is_causal, "enable_gqa": True}
    dap.selected_attention(query, key, value, indices, **options, **more).sum().backward()


def pack(pattern: str, backend: str) -> None:
    """Forward and backward pass of attention on packed documents, whose bounds stay on the device."""
    import torch

    dap = importlib.import_module(PACKAGE)
    x = [torch.zeros(1, 4, 1024, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, 300, 1024], dtype=torch.int32)
    dap.attention(*x, pattern, cu_seqlens=bounds, backend=backend).sum().backward()


LADDER, UNEVEN = "dilated:128x1,256x2,640x5", "dilated:300x3,200x1"
CALLS: dict[str, Callable[[], object]] = {}
for _name in ("hopper", "triton"):
    for _title, _pattern, _more in (
        ("window", "window:200", {}),
        ("causal window, width 128", "window:200 & causal", {"d": 128}),
        ("causal, grouped heads", "causal", {"k": 1}),
        ("causal, float16, width 128", "causal", {"dtype": "float16", "d": 128, "k": 2}),
        ("ladder", LADDER, {}),
        ("causal ladder, width 128", f"{LADDER} & causal", {"d": 128}),
        ("ladder of uneven strides", UNEVEN, {}),
        ("ladder by heads, grouped heads", "dilated:128x1,256x2;heads=split;offset=block", {"k": 2}),
        ("block lists of 128", "random:0.3;block=128;seed=1;per_head=1 & causal", {}),
        ("block lists of 128, width 128", "random:0.3;block=128;seed=1", {"d": 128}),
        ("global and window", "global:64 | window:100", {}),
        ("global and window, long rows", "global:64 | window:100", {"n": 16384, "h": 1, "k": 1}),
        ("documents", "documents:130,1,300,209 & causal", {}),
        ("blocks of 256", "causal", {"block": 256}),
        ("sink", "window:127,0", {"sink": True, "k": 1}),
        ("sink, causal ladder, width 128", f"{LADDER} & causal", {"sink": True, "d": 128}),
        ("block lists of 64, width 128", "random:0.3;block=64;seed=1;per_head=1 & causal", {"block": 64, "d": 128}),
    ):
        CALLS[f"{_name} {_title}"] = lambda n=_name, p=_pattern, m=_more: attend(n, p, **m)
for _title, _pattern, _more in (
    ("padding", "causal", {"padding": True}),
    ("padded ladder, width 128", f"{LADDER} & causal", {"padding": True, "d": 128, "k": 2}),
    ("width 80, values of 48", "window:200", {"d": 80, "e": 48}),
):
    CALLS[f"hopper {_title}"] = lambda p=_pattern, m=_more: attend("hopper", p, **m)
for _title, _pattern, _more in (
    ("block lists of 64", "random:0.3;block=64;seed=1;per_head=1 & causal", {"block": 64}),
    ("float32", LADDER, {"dtype": "float32"}),
    ("float32, width 128", "causal", {"dtype": "float32", "d": 128}),
    ("width 80, values of 48", "window:200", {"d": 80, "e": 48}),
    ("width 256", "window:200", {"d": 256}),
    ("dropout", "causal", {"dropout_p": 0.1}),
    ("padding", "causal", {"padding": True}),
    ("anomaly detection", "window:200", {"anomaly": True}),
    ("soft cap", "causal", {"softcap": 30.0}),
    ("soft cap, width 128", "window:200", {"softcap": 30.0, "d": 128}),
    ("bias", "causal", {"table": (255,)}),
    ("bias beyond its table, width 128", "window:600,0", {"table": (63,), "d": 128}),
    ("bias by places", "window:200", {"table": (15, 15), "places": 2}),
    ("soft cap and bias", f"{LADDER} & causal", {"table": (255,), "softcap": 30.0}),
):
    CALLS[f"triton {_title}"] = lambda p=_pattern, m=_more: attend("triton", p, **m)
for _causal in (False, True):
    _rows = "tokens" if _causal else "blocks"
    for _title, _unit, _more in (
        ("unit 1", 1, {}),
        ("unit 2", 2, {}),
        ("unit 4", 4, {}),
        ("unit 8", 8, {}),
        ("unit 16", 16, {}),
        ("width 128", 16, {"d": 128}),
        ("blocks of 64", 16, {"block": 64}),
        ("grouped heads", 16, {"keys": 2}),
        ("float16", 16, {"dtype": "float16"}),
        ("float32", 16, {"dtype": "float32"}),
        ("padding", 16, {"padding": True}),
        ("triton", 16, {"backend": "triton"}),
        ("ragged", 16, {"n": 1000}),
        ("long rows", 16, {"n": 65536}),
        ("inference", 16, {"trains": False, "config": {"exploration": False}}),
        ("adaptive ratio", 16, {"config": {"adaptive_ratio": 0.9}}),
        ("rank 64", 16, {"config": {"match_rank": 64}}),
        ("without exploration, unit 4", 4, {"config": {"exploration": False}}),
        ("one list for all heads", 1, {"config": {"select": "all", "match_rank": 16}}),
    ):
        CALLS[f"learned {_rows}, {_title}"] = lambda c=_causal, u=_unit, m=_more: learn(c, u, **m)
CALLS["learned causal blocks"] = lambda: learn(True, 16, config={"granularity": "block"})
CALLS["learned causal blocks, ragged"] = lambda: learn(True, 16, n=1000, config={"granularity": "block"})
for _causal, _size, _tokens in ((False, 128, False), (True, 64, False), (True, 128, True), (False, 64, True)):
    _title = f"{'causal ' if _causal else ''}{'tokens' if _tokens else 'blocks'} of {_size}"
    CALLS[f"selected {_title}"] = lambda c=_causal, s=_size, t=_tokens: select(c, s, t)
    CALLS[f"selected {_title}, packed"] = lambda c=_causal, s=_size, t=_tokens: select(c, s, t, packed=True)
CALLS["packed window, triton"] = lambda: pack("window:200 & causal", "triton")
CALLS["packed causal, auto"] = lambda: pack("causal", "auto")


def record(names: list[str], out: Path) -> None:
    """Write the launches of calls, or the error of those that the tree cannot run, one JSON object a line."""
    pretend_gpu()
    recorder = Recorder()
    with open(out, "w") as file:
        for name in names:
            line = {"call": name} | recorder.launches(CALLS[name])
            file.write(json.dumps(line) + "\n")
            file.flush()


# The comparing process.


def recorded(root: Path, triton: str, names: list[str]) -> dict[str, Any]:
    """Launches of calls by name, from a process with the sources of a tree and a release of Triton."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        origin = None if triton else find_spec("triton")
        package = Path(triton) / "triton" if origin is None else Path(str(origin.origin)).parent
        build = ["-O1", "-shared", "-fPIC", f"-I{package}/backends/nvidia/include", "-Wl,-soname,libcuda.so.1"]
        source = ROOT / "tests" / "kernels" / "stub_cuda.c"
        subprocess.run([shutil.which("cc") or "cc", source, *build, "-o", folder / "libcuda.so.1"], check=True)
        stub = {"TRITON_LIBCUDA_PATH": text, "LD_LIBRARY_PATH": text, "TRITON_CACHE_DIR": text, "OMP_NUM_THREADS": "1"}
        paths = [*filter(None, [triton]), str(root / "src")]
        environment = os.environ | stub | {"PYTHONPATH": os.pathsep.join(paths), "JAXTYPING_DISABLE": "1"}
        for name in ("TRITON_INTERPRET", "DISABLE_LLVM_OPT"):
            environment.pop(name, None)
        program = [sys.executable, __file__, "--record", str(folder / "out"), "--calls", *names]
        done = subprocess.run(program, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        lines = map(json.loads, (folder / "out").read_text().splitlines())
        return {line["call"]: line for line in lines}


def compared(last: list[dict[str, Any]], present: list[dict[str, Any]], known: dict[str, str]) -> list[dict[str, Any]]:
    """A line for each launch of a call, matched in order; `known` says of which tree the code of a hash is."""
    lines = []
    matcher = SequenceMatcher(None, [one["hash"] for one in last], [one["hash"] for one in present], autojunk=False)
    for tag, begin, end, first, after in matcher.get_opcodes():
        olds, news = last[begin:end], present[first:after]
        for old, new in zip(olds, news, strict=False):
            fields = [name for name, value in new["launch"].items() if old["launch"][name] != value]
            code = "identical" if tag == "equal" else known.get(new["hash"][:16], "changed")
            line = {"kernel": new["kernel"], "code": code, "launch": fields or "identical"}
            if tag != "equal":
                line["differs"] = differences(old["arguments"], new["arguments"])
                line |= {"last_kernel": old["kernel"]} if old["kernel"] != new["kernel"] else {}
            lines.append(line | {"hash": new["hash"][:16]})
        for one in news[len(olds) :]:
            short = one["hash"][:16]
            lines.append({"kernel": one["kernel"], "code": known.get(short, "new"), "hash": short})
        lines += [{"kernel": one["kernel"], "code": "gone"} for one in olds[len(news) :]]
    return lines


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Arguments of a kernel that two trees compile differently."""
    names = [*dict.fromkeys([*old, *new])]
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def compare(last: str, measured: str | None, triton: str, names: list[str], out: Path) -> Counter[str]:
    """Write the comparison of this tree with those of commits; how many launches have which code."""
    ran: dict[str, str] = {}
    if measured and Path(measured).is_file():
        earlier = [line for line in map(json.loads, Path(measured).read_text().splitlines()) if "measured" in line]
        if not earlier:
            raise RuntimeError(f"{measured} must hold lines that were compared with a measured commit")
        ran = {line["hash"]: "measured" for line in earlier if line["code"] == "measured"}
        facts, measured = {"measured": earlier[0]["measured"]}, None
    else:
        facts = {"measured": measured} if measured else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        roots = {commit: Path(folder) / commit for commit in (last, measured) if commit}
        for commit, root in roots.items():
            root.mkdir()
            archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True)
            subprocess.run(["tar", "x", "-C", root], input=archive.stdout, check=True)
        if foreign := unstamped(roots[last]):
            raise RuntimeError(f"{last} is not the commit of {STAMP.name}: other sources of {', '.join(foreign)}")
        patterns = [name for name in names if name.startswith(("hopper", "triton"))]
        wanted = [(root, patterns if commit == measured else names) for commit, root in roots.items()]
        before, *more, present = pool.map(lambda x: recorded(x[0], triton, x[1]), [*wanted, (ROOT, names)])
    known = ran
    for word, tree in (*(("measured", x) for x in more), ("known", before)):
        known |= {one["hash"][:16]: word for line in tree.values() for one in line["launches"]}
    total: Counter[str] = Counter()
    facts |= facts_of(last, triton)
    lines = []
    for name in names:
        if "error" in present[name]:
            raise RuntimeError(f"{name}: {present[name]['error']}")
        for line in compared(before[name]["launches"], present[name]["launches"], known):
            total[line["code"]] += 1
            lines.append({"suite": "generated code", "call": name} | line | facts)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return total


def unstamped(root: Path) -> list[str]:
    """Files of a tree that differ from those of the stamp."""
    stamp = json.loads(STAMP.read_text())["sources"]
    return [
        name
        for name, digest in stamp.items()
        if name.startswith("src/") and hashlib.sha256((root / name).read_bytes()).hexdigest() != digest
    ]


def facts_of(commit: str, triton: str) -> dict[str, str]:
    """What the result depends on."""
    import platform
    from importlib.metadata import distributions, version

    from dilated_attention_pytorch.tools.bench.measure import git_sha

    (release,) = {x.version for x in distributions(name="triton", path=[triton])} if triton else {version("triton")}
    software = {"torch": version("torch"), "triton": release, "python": platform.python_version()}
    return {"device": "none: compiled for sm_90", "last": commit, "git": git_sha() or "", **software}


def quick_hashes(names: Sequence[str] = QUICK) -> dict[str, list[str]]:
    """Kernel and hash of the launches of calls, with the installed Triton."""
    calls = recorded(ROOT, "", [*names])
    return {name: [f"{one['kernel']} {one['hash'][:16]}" for one in calls[name]["launches"]] for name in names}


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 where `--check` finds other code than the recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--last", help="commit of gpu_stamp.json")
    what.add_argument("--check", action="store_true", help="compare a few calls with recorded hashes")
    what.add_argument("--write", action="store_true", help="record the hashes of --check")
    what.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measured", help="later commit of which a GPU ran calls with patterns, or a result with it")
    parser.add_argument("--triton", default="", help="folder of a release of Triton for --last")
    parser.add_argument("--calls", nargs="+", default=[*CALLS], help="names of calls for --last; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS / "generated_code.jsonl", help="result of --last")
    given = parser.parse_args(arguments)
    if given.record:
        record(given.calls, given.record)
    elif given.last:
        print(dict(compare(given.last, given.measured, given.triton, given.calls, given.out)))
    else:
        import triton

        hashes, present = json.loads(HASHES.read_text()) if HASHES.is_file() else {}, quick_hashes()
        if given.write:
            HASHES.write_text(json.dumps(hashes | {triton.__version__: present}, indent=1) + "\n")
        elif present != hashes.get(triton.__version__):
            print(f"generated code differs from {HASHES.name}: run it on a GPU, then record it with --write")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
