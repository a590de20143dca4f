"""What torch does to modules: compile, autocast, checkpointing, DDP, FSDP2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings

import pytest
import torch
from oracle import error
from torch import nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.nn import (
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    MultiheadSparseAttention,
)
from dilated_attention_pytorch.nn.positional import Xpos

CORES = {
    "dilated": lambda: DilatedAttention([16, 64], [1, 4]),
    "block": lambda: BlockSparseRingDilatedAttention([64], [1], sparsity_ratio=0.4, block_size=16),
    "hierarchical": lambda: BlockSparseHierarchical([32, 128], [1, 2], block_size=16),
}
MULTIHEADS = {
    "dilated": lambda: MultiheadDilatedAttention(32, 4, [16, 64], [1, 4], num_kv_heads=2, position="rotary"),
    "block": lambda: BlockSparseRingMultiheadDilatedAttention(
        32, 4, [64], [1], sparsity_ratio=0.4, block_size=16, position="xpos"
    ),
    "any": lambda: MultiheadSparseAttention(32, 4, "window:9 | global:3", layer_norm=True),
}


@pytest.fixture
def quiet_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
        yield


@pytest.mark.compile
@pytest.mark.parametrize("name", CORES)
def test_core_modules_compile_whole(name, quiet_compiler):
    module = CORES[name]()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for n in (80, 100):
        q, k, v = (torch.randn(1, n, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
        found, wanted = compiled(q, k, v, is_causal=True), module(q, k, v, is_causal=True)
        assert error(found, wanted.detach()) < 1e-12
        grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (found, wanted)]
        assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-12


@pytest.mark.compile
@pytest.mark.parametrize("name", MULTIHEADS)
@pytest.mark.parametrize("padding", [None, torch.bool, torch.float32])
def test_multihead_modules_compile_whole(name, padding, quiet_compiler):
    module = MULTIHEADS[name]().double()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 80, 32, dtype=torch.float64)
    mask = None
    if padding is not None:
        mask = torch.arange(80) >= torch.tensor([80, 50])[:, None]
        mask = mask if padding == torch.bool else torch.zeros(2, 80).masked_fill(mask, float("-inf"))
    found, wanted = (f(x, is_causal=True, key_padding_mask=mask)[0] for f in (compiled, module))
    assert error(found, wanted.detach()) < 1e-12
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def bad_values():
    """Calls that a check of values refuses: name -> (module, keywords, part of the message)."""
    torch.manual_seed(0)
    finite = torch.zeros(1, 40).index_fill(1, torch.arange(30, 40), -50.0)
    mask = torch.ones(40, 40, dtype=torch.bool).triu(1)
    mask[30, 3] = True
    window = MultiheadSparseAttention(32, 4, "window:9")
    return {
        "padding -50": (window, {"key_padding_mask": finite}, "0, and -inf or at most"),
        "mask beside is_causal": (window, {"attn_mask": mask, "is_causal": True}, "must be the causal mask"),
        "xpos out of range": (
            MultiheadSparseAttention(32, 4, "window:9", position=Xpos(scale_base=0.1)),
            {"is_causal": True},
            "XPOS must stay within",
        ),
    }


COMPILERS = [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
CHECKED = [(name, *compiler) for name in bad_values() for compiler in COMPILERS]
# Eager calls add finite values of a padding mask to the scores.
CHECKED += [(name, None, False) for name in bad_values() if name != "padding -50"]


@pytest.mark.compile
@pytest.mark.parametrize(("name", "backend", "training"), CHECKED)
def test_checks_of_values_survive_the_compiler(name, backend, training, quiet_compiler):
    module, options, message = bad_values()[name]
    call = module if backend is None else torch.compile(module, fullgraph=True, backend=backend)
    with torch.set_grad_enabled(training), pytest.raises(ValueError, match=message):
        call(torch.randn(1, 40, 32), **options)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_checked_calls_match_eager_when_compiled(backend, quiet_compiler):
    module = MultiheadSparseAttention(32, 4, "window:9", position="xpos").double()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    padding = torch.zeros(2, 40).index_fill(1, torch.arange(30, 40), -torch.inf)
    causal = torch.full((40, 40), -torch.inf).triu(1)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    found, wanted = (
        call(x, key_padding_mask=padding, attn_mask=causal, is_causal=True)[0] for call in (compiled, module)
    )
    assert error(found, wanted.detach()) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float_padding_replays_in_a_cuda_graph():
    module = MultiheadSparseAttention(64, 4, "window:64", device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(2, 512, 64, device="cuda", dtype=torch.bfloat16)
    padding = torch.zeros(2, 512, device="cuda")
    padding[1, 300:] = -torch.inf
    with torch.no_grad():
        wanted = module(x, key_padding_mask=padding)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = module(x, key_padding_mask=padding)[0]
        graph.replay()
    assert torch.equal(found, wanted)


BAD_PADDING_ON_A_GPU = """
import torch
from dilated_attention_pytorch.nn import MultiheadSparseAttention
module = MultiheadSparseAttention(64, 4, "window:64", device="cuda", dtype=torch.bfloat16).eval()
x = torch.randn(2, 512, 64, device="cuda", dtype=torch.bfloat16)
padding = torch.zeros(2, 512, device="cuda")
with torch.no_grad():
    module(x, key_padding_mask=padding)
    if {captured}:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(x, key_padding_mask=padding)
        call = graph.replay
    else:
        compiled = torch.compile(module, fullgraph=True, mode="{mode}")
        call = lambda: compiled(x, key_padding_mask=padding)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    print("before", flush=True)
    padding[0, 7] = -1e9
    call()
    torch.cuda.synchronize()
print("after", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("captured", "mode"), [(True, ""), (False, "default"), (False, "reduce-overhead")], ids=["graph", "", "trees"]
)
def test_bad_padding_stops_a_gpu_without_a_host_sync(captured, mode):
    # A device assertion ends the CUDA context, so it has a process of its own.
    script = BAD_PADDING_ON_A_GPU.format(captured=captured, mode=mode)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert ended.stdout.split() == ["before"], ended.stderr
    assert "device-side assert" in ended.stderr


@pytest.mark.compile
def test_a_memory_budget_compiles_whole(quiet_compiler):
    q, k, v = (torch.randn(1, 80, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    module, within = (DilatedAttention([16, 64], [1, 4], backend="cpu", memory_budget=m) for m in (None, 136 * 2**20))
    found, wanted = torch.compile(within, fullgraph=True, backend="aot_eager")(q, k, v), module(q, k, v)
    assert error(found, wanted.detach()) < 1e-12
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (found, wanted)]
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-12


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_an_encoder_compiles_whole_and_calls_the_module(quiet_compiler):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadSparseAttention.from_torch(layer.self_attn, "window:4")
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 30, 32)
    padding = torch.arange(30) >= torch.tensor([30, 12])[:, None]
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(x, src_key_padding_mask=padding)
        assert error(found, model(x, src_key_padding_mask=padding)) < 1e-5
        moved = x.clone()
        moved[:, -1] += 10.0
        assert torch.equal(
            model(moved, src_key_padding_mask=padding)[:, :15], model(x, src_key_padding_mask=padding)[:, :15]
        )


@pytest.mark.parametrize("name", MULTIHEADS)
def test_autocast_keeps_the_dtypes_of_gradients(name):
    module = MULTIHEADS[name]()
    x = torch.randn(1, 80, 32)
    wanted = module(x, is_causal=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x, is_causal=True)[0]
    assert output.dtype == torch.bfloat16
    assert error(output, wanted.detach()) < 0.05
    output.sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", CORES)
def test_core_modules_under_autocast_and_checkpointing(name):
    module = CORES[name]()
    module.attention_dropout = 0.3
    q, k, v = (torch.randn(1, 80, 4, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(q, k, v).dtype == torch.bfloat16
    grads = []
    for again in (False, True):
        torch.manual_seed(5)
        output = checkpoint(module, q, k, v, use_reentrant=False) if again else module(q, k, v)
        grads.append(torch.autograd.grad(output.square().sum(), (q, k, v)))
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-6


@pytest.mark.parametrize("name", MULTIHEADS)
def test_checkpointing_repeats_the_forward_exactly(name):
    module = MULTIHEADS[name]().double()
    module.dropout = 0.3
    x = torch.randn(1, 80, 32, dtype=torch.float64, requires_grad=True)
    grads = []
    for again in (False, True):
        torch.manual_seed(5)
        run = lambda t: module(t, is_causal=True)[0]  # noqa: E731
        output = checkpoint(run, x, use_reentrant=False) if again else run(x)
        grads.append(torch.autograd.grad(output.square().sum(), (x, *module.parameters())))
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-12


@pytest.fixture
def one_process():
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


def gradients(module, x):
    module(x, is_causal=True)[0].square().sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", MULTIHEADS)
def test_wrapping_for_data_parallel_training(name, wrap, one_process):
    plain = MULTIHEADS[name]().double()
    wrapped = MULTIHEADS[name]().double()
    wrapped.load_state_dict(plain.state_dict())
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(wrapped)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(wrapped, mesh=init_device_mesh("cpu", (1,)))
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    pairs = zip(gradients(wrapped, x), gradients(plain, x), strict=True)
    assert max(error(a, b) for a, b in pairs) < 1e-12
