"""Plans as dense pieces: which plans qualify, that the pieces are the plan, and that joining them is exact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch.kernels import cudnn
from dilated_attention_pytorch.kernels.registry import AttentionCall
from dilated_attention_pytorch.kernels.segments import branches_of
from dilated_attention_pytorch.patterns import Dilated, parse
from dilated_attention_pytorch.plan import make_plan

HERE = Path(__file__).resolve().parent
TRIALS = [
    line.strip().split('"')[1]
    for line in (HERE / "interpret_cudnn.py").read_text().splitlines()
    if line.startswith('    "') and "Trial(" in line
]


def call_of(text, n, heads, key_heads=None, batch=1, block=16, tokens_first=False, **changes):
    def rows(count):
        shape = (batch, n, count, 8) if tokens_first else (batch, count, n, 8)
        made = torch.zeros(shape, dtype=torch.bfloat16)
        return made.transpose(1, 2) if tokens_first else made

    pattern = parse(text) if isinstance(text, str) else text
    keys = rows(key_heads or heads)
    return AttentionCall(rows(heads), keys, keys, make_plan(pattern, n, heads, block), 1.0, **changes)


def multiplicities(call):
    """How often each pair of tokens meets, int32 (B, H, N, N), read off the pieces' views alone."""
    batch, heads, n, _ = call.query.shape
    group = heads // call.key.shape[1]
    # Every row carries its own number, so that a view tells which rows it holds.
    query, key = ((torch.arange(b * h * n).view(b, h, n, 1).expand(b, h, n, 8)) for b, h in sizes(call))
    query, key = (laid_like(rows, like) for rows, like in ((query, call.query), (key, call.key)))
    counts = torch.zeros(batch * heads * n, n, dtype=torch.int32)
    for piece in cudnn.layout_of(call).pieces:
        q, k = piece.view(query)[..., 0], piece.view(key, keys=True)[..., 0]
        assert ((k // n) % (heads // group) == (q // n) % heads // group).all(), "a piece reads another head's keys"
        assert (k // n // (heads // group) == q // n // heads).all(), "a piece reads another batch's keys"
        meets = torch.ones(piece.length, piece.length, dtype=torch.int32)
        meets = meets.tril() if piece.causal else meets
        index = (q[..., :, None] * n + k[..., None, :] % n).flatten()
        counts.view(-1).index_add_(0, index, meets.expand(*q.shape[:2], -1, -1).flatten())
    return counts.view(batch, heads, n, n)


def sizes(call):
    return [t.shape[:2] for t in (call.query, call.key)]


def laid_like(rows, like):
    return torch.empty_strided(like.size(), like.stride(), dtype=torch.int64).copy_(rows)


@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads-outside", "tokens-outside"])
@pytest.mark.parametrize(
    ("text", "n", "heads", "key_heads", "batch"),
    [
        ("full", 40, 2, 2, 2),
        ("causal", 37, 4, 2, 1),
        ("dilated:16x1,32x2,64x4", 128, 4, 4, 2),
        ("dilated:16x1,32x2,64x4 & causal", 141, 8, 2, 1),
        ("dilated:24x1,50x3,90x7 & causal", 131, 5, 5, 3),
        ("dilated:16x1,64x4;offset=block", 100, 6, 3, 1),
        ("dilated:16x1,32x2;heads=split", 80, 3, 3, 2),
        ("dilated:32x8", 64, 2, 1, 1),
        ("strided:7", 70, 2, 2, 1),
        ("documents:30,30,1,45,20 & causal", 126, 2, 2, 1),
        ("heads{causal / dilated:32x4}", 96, 2, 2, 1),
    ],
)
def test_the_pieces_are_the_plan(text, n, heads, key_heads, batch, tokens_first):
    call = call_of(text, n, heads, key_heads, batch, tokens_first=tokens_first)
    assert (multiplicities(call) == call.plan.to_dense()).all()


@given(
    n=st.integers(1, 200),
    heads=st.integers(1, 7),
    branches=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 9)), min_size=1, max_size=3),
    offset=st.sampled_from(["mod", "block"]),
    causal=st.booleans(),
    batch=st.integers(1, 2),
)
@settings(max_examples=60)
def test_every_dilated_pattern_falls_into_pieces(n, heads, branches, offset, causal, batch):
    pattern = Dilated(*zip(*branches, strict=True), offset=offset)
    call = call_of(pattern & parse("causal") if causal else pattern, n, heads, batch=batch)
    assert (multiplicities(call) == call.plan.to_dense()).all()


@pytest.mark.parametrize(
    "text",
    [
        "window:20",
        "window:20 & causal",
        "random:0.4;block=16",
        "dilated:16x1,32x2;overlap=union",
        "global:5 | window:3",
        "dilated:64x2 & window:9",
        "blocks:0,1 2,,3;block=16",
    ],
)
def test_other_plans_are_refused(text):
    assert branches_of(make_plan(parse(text), 64, 2, 16)) is None


def test_a_ladder_needs_few_calls():
    ladder = "dilated:64x1,128x2,256x4,512x6,1024x12"
    lengths = {(heads, first): len(cudnn.layout_of(call_of(ladder, 2048, heads, tokens_first=first)).pieces)
               for heads in (8, 16) for first in (False, True)}  # fmt: skip
    assert max(lengths.values()) <= 15
    assert lengths[8, False] < sum((1, 2, 4, 6, 8)), "heads of different residues share calls"


def test_views_copy_nothing():
    call = call_of("dilated:16x1,64x4", 128, 8)
    for piece in cudnn.layout_of(call).pieces:
        assert piece.view(call.query).untyped_storage().data_ptr() == call.query.untyped_storage().data_ptr()


def test_layouts_are_kept_with_the_plan():
    call = call_of("dilated:16x1,64x4", 128, 8)
    assert cudnn.layout_of(call) is cudnn.layout_of(call)
    plans = len(cudnn._layouts)
    del call
    assert len(cudnn._layouts) == plans - 1


def test_the_reason_names_the_device():
    assert cudnn.why_not(call_of("causal", 32, 2)) == "needs a CUDA tensor, got cpu"


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A machine whose tensors say they are on a GPU, as far as `why_not` asks."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(cudnn, "engine", lambda device: "cudnn")


def test_a_ladder_is_accepted(on_a_gpu):
    assert cudnn.why_not(call_of("dilated:16x1,64x4 & causal", 128, 8)) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"key_padding_mask": torch.zeros(1, 64, dtype=torch.bool)}, "padding"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"text": "window:5"}, "segments"),
        ({"text": f"documents:{','.join(str(3 + i) for i in range(70))}", "n": 2625}, "dense calls"),
    ],
    ids=["padding", "dropout", "window", "many-documents"],
)
def test_what_dense_kernels_cannot_do_is_refused_with_the_reason(on_a_gpu, changes, word):
    reason = cudnn.why_not(call_of(**{"text": "causal", "n": 64, "heads": 2} | changes))
    assert reason is not None and word in reason


@pytest.mark.parametrize(
    ("dtype", "width", "start"), [(torch.float32, 8, 0), (torch.bfloat16, 12, 0), (torch.bfloat16, 8, 1)]
)
def test_rows_the_dense_kernels_cannot_read_are_refused(on_a_gpu, dtype, width, start):
    rows = torch.zeros(2 * 64 * width + start, dtype=dtype)[start:].view(1, 2, 64, width)
    call = AttentionCall(rows, rows, rows, make_plan(parse("causal"), 64, 2, 16), 1.0)
    assert cudnn.why_not(call) is not None


@pytest.fixture(scope="module")
def interpreted():
    """Errors of every trial against the oracle, from one run of the interpreter."""
    pytest.importorskip("triton")
    source = HERE.parents[1] / "src"
    paths = [str(source), str(HERE.parent), str(HERE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(HERE / "interpret_cudnn.py")], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {line.pop("trial"): line for line in lines}


@pytest.mark.xdist_group("cudnn interpreter")
@pytest.mark.parametrize("trial", TRIALS)
def test_joined_pieces_match_the_oracle(interpreted, trial):
    # Float32 carries between the pieces, which themselves are computed in float64.
    assert {name: bound for name, bound in interpreted[trial].items() if not bound <= 2e-6} == {}


def test_single_rows_have_their_closed_form():
    query, key, value, grad, output = torch.randn(5, 3, 2, 1, 8).unbind()
    scale = 0.3
    rows, lse = cudnn.attend(query, key, value, True, scale)
    assert torch.equal(rows, value)
    merged = torch.logaddexp(lse, torch.randn(3, 2, 1))
    inputs = [t.double().requires_grad_() for t in (query, key, value)]
    q, k, v = inputs
    weight = torch.exp(scale * (q * k).sum(-1, keepdim=True))
    # Other keys bring the rest of the denominator and of the output; both are constants here.
    rest = torch.exp(merged.double())[..., None] - weight.detach()
    outside = output.double() * (rest + weight.detach()) - weight.detach() * value.double()
    joined = (weight * v + outside) / (weight + rest)
    wanted = torch.autograd.grad(joined, inputs, grad.double())
    got = cudnn.attend_backward(query, key, value, output, grad, merged, True, scale)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
