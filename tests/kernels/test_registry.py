"""Choice of the backend, order of the candidates, and the explanation of the choice."""

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch import BackendUnsupported
from dilated_attention_pytorch.kernels import registry
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.registry import MODULES, backend_named, choose, explain, preference
from dilated_attention_pytorch.ops.explain import explain as explain_arguments
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan
from dilated_attention_pytorch.plan.documents import documents_plan

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    (kind, line)
    for kind, lines in json.loads(
        resources.files("dilated_attention_pytorch.kernels").joinpath("preference.json").read_text()
    ).items()
    for line in lines
]


def call_of(text="window:4", n=64, heads=2, d=8):
    query = torch.randn(1, heads, n, d)
    pattern = parse(text)
    return AttentionCall(query, query, query, make_plan(pattern, n, heads, 16), 0.3, pattern=pattern)


@pytest.mark.parametrize(("kind", "line"), LINES, ids=lambda value: value if isinstance(value, str) else value["when"])
def test_every_order_names_backends_and_a_measurement(kind, line):
    assert re.fullmatch(r"any|cpu|cuda( sm_\d+)?", kind)
    assert line["when"] in ("block-sparse", "dilated", "uncommon", "any")
    assert set(line["order"]) <= set(MODULES)
    assert len(set(line["order"])) == len(line["order"])
    files = re.findall(r"benchmarks/results/\w+\.jsonl", line["because"])
    assert files or line["because"].startswith("not measured")
    assert all((ROOT / name).exists() for name in files)
    assert bool(re.search(r"\d", line["because"])) == bool(files), "a figure needs the file it is from"


def test_every_device_and_plan_has_an_order():
    kinds = {(kind, line["when"]) for kind, line in LINES}
    assert ("any", "any") in kinds
    for kind in {kind for kind, _ in LINES}:
        assert (kind, "any") in kinds or {(kind, "block-sparse"), (kind, "dilated")} <= kinds


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("window:4 & causal", "block-sparse"),
        ("random:0.4;block=16", "block-sparse"),
        ("dilated:16x1,32x2", "dilated"),
        ("dilated:32x2", "dilated"),
    ],
)
def test_a_plan_is_looked_up_by_its_class_and_its_device(text, when, monkeypatch):
    asked = []
    monkeypatch.setattr(registry, "_preference", lambda device, *kinds: asked.append((device.type, *kinds)))
    preference(call_of(text, d=64))
    preference(call_of(text, d=32))
    assert asked == [("cpu", when), ("cpu", "uncommon", when)]


def test_auto_chooses_the_first_supported_backend(monkeypatch):
    monkeypatch.setattr(registry, "_preference", lambda *_: registry.Preference(("triton", "reference", "cpu"), "why"))
    call = call_of()
    assert choose(call)[0] == "reference"
    told = explain(call)
    assert told.backend == "reference"
    assert told["reference"] is None
    assert told["triton"] == "needs a CUDA tensor, got cpu"
    first, *lines = str(told).splitlines()
    assert first == "auto selects reference: the order is triton, reference, cpu (why)"
    states = dict(line.strip().split(":", 1) for line in lines)
    assert [name.strip() for name in states] == list(MODULES)
    assert states["cpu      "].strip() == "can run it, later in the order"
    assert states["flex     "].strip() == "can run it by name"


@pytest.mark.untyped
@pytest.mark.parametrize(("capability", "plain"), [((9, 0), "hopper"), ((8, 0), "triton")])
def test_changed_scores_run_on_triton_on_a_gpu(monkeypatch, capability, plain):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(backend_named("hopper"), "why_not", lambda _: None)
    device = torch.device("cuda", 0)
    rows = SimpleNamespace(shape=(1, 2, 256, 64), dtype=torch.bfloat16, device=device, is_cuda=True)
    plan = SimpleNamespace(parts=(), block_size=128, n=256, device=device, device_tables=None)
    call = AttentionCall(rows, rows, rows, plan, 0.125, pattern=parse("causal"))
    assert choose(call)[0] == plain
    call = replace(call, softcap=50.0)
    assert choose(call)[0] == "triton"
    told = explain(call)
    assert told.backend == "triton" and told["triton"] is told["reference"] is None
    assert told["hopper"] == told["flex"] == "has no softcap; triton has one"
    biased = explain(replace(call, softcap=0.0, bias=torch.zeros(2, 3)))
    assert biased.backend == "triton" and biased["hopper"] == "has no bias by distance; triton has one"
    assert told["cpu"] == "needs a CPU tensor, got cuda:0"
    with pytest.raises(BackendUnsupported, match="hopper: has no softcap; triton has one"):
        choose(call, "hopper")


MASK = torch.zeros(1, 256, dtype=torch.bool)
LADDER = make_plan("dilated:64x1,256x4", 256, 2).parts
COMMON = {
    "width 64": {},
    "width 40": {"d": 40, "e": 40},
    "width 104": {"d": 104, "e": 104},
    "widths 64 and 128": {"e": 128},
    "blocks of 64": {"d": 128, "e": 128, "block_size": 64},
    "padding": {"key_padding_mask": MASK},
    "ladder": {"parts": LADDER},
    "ladder of width 128": {"d": 128, "e": 128, "parts": LADDER},
}
UNCOMMON = {
    "width 32": {"d": 32, "e": 32},
    "widths 128 and 32": {"d": 128, "e": 32},
    "fewer queries": {"rows": 128},
    "blocks of 64 without a pattern": {"d": 128, "e": 128, "block_size": 64, "pattern": None},
    "negative scale": {"scale": -0.125},
    "scale of zero": {"scale": 0.0},
    "padded ladder": {"parts": LADDER, "key_padding_mask": MASK},
    "ladder of width 80": {"d": 80, "e": 80, "parts": LADDER},
    "ladder of widths 64 and 128": {"e": 128, "parts": LADDER},
    "ladder of blocks of 64": {"d": 128, "e": 128, "block_size": 64, "parts": LADDER},
    "padded blocks of 64": {"d": 128, "e": 128, "block_size": 64, "key_padding_mask": MASK},
    "blocks of 64 of width 96": {"d": 96, "e": 96, "block_size": 64},
}


@pytest.mark.untyped
@pytest.mark.parametrize("name", [*COMMON, *UNCOMMON])
def test_auto_takes_hopper_where_it_was_measured_to_be_faster(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend_named("hopper"), "why_not", lambda _: None)
    device = torch.device("cuda", 0)
    options = {"d": 64, "e": 64, "rows": 256, "scale": 0.125, "block_size": 128, "pattern": parse("causal")} | (
        COMMON | UNCOMMON
    )[name]
    options = {"parts": ()} | options
    d, e, rows, scale, size, parts = (options.pop(x) for x in ("d", "e", "rows", "scale", "block_size", "parts"))
    query, key, value = (
        SimpleNamespace(shape=(1, 2, *shape), dtype=torch.bfloat16, device=device, is_cuda=True)
        for shape in ((rows, d), (256, d), (256, e))
    )
    plan = SimpleNamespace(parts=parts, block_size=size, n=256, device=device, device_tables=None)
    call = AttentionCall(query, key, value, plan, scale, **options)
    assert choose(call)[0] == ("hopper" if name in COMMON else "triton")
    assert choose(call, "hopper")[0] == "hopper"
    assert ("not measured" in str(explain(call))) == (name in UNCOMMON)
    # Elsewhere these calls have the order of any other.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert choose(call)[0] == "triton" and preference(call).order == ("triton", "reference")


def test_error_and_explanation_name_every_reason(monkeypatch):
    monkeypatch.setattr(registry, "_preference", lambda *_: registry.Preference(("triton", "hopper"), "why"))
    call = call_of()
    with pytest.raises(BackendUnsupported) as caught:
        choose(call)
    assert list(caught.value.reasons) == ["triton", "hopper"]
    assert explain(call).backend is None
    assert str(explain(call)).startswith("no backend can run this call")


@pytest.mark.untyped
def test_a_call_is_explained_by_its_arguments():
    query = torch.randn(1, 4, 64, 8)
    told = explain_arguments(query, query[:, :2], query[:, :2], "window:4", is_causal=True, enable_gqa=True)
    assert told.backend in ("native", "cpu")
    assert told["flex"] is None
    told = explain_arguments(query, query, query, parse("window:4"), dropout_p=0.1)
    assert told["flex"] == "has no dropout; pass dropout_p=0.0"
    with pytest.raises(TypeError, match="pattern must be a Pattern or text, got int"):
        explain_arguments(query, query, query, 3)


def test_an_unknown_device_gets_the_order_for_any():
    assert registry._preference(torch.device("meta"), "dilated").order == ("reference",)


def test_device_tables_need_a_backend_that_never_reads_them():
    plan = documents_plan(torch.tensor([0, 30, 64]), 64, 2, 16, 8, 0)
    call = replace(call_of(), plan=plan)
    reasons = explain(call)
    assert reasons.pop("triton") == "needs a CUDA tensor, got cpu"
    assert {reason.split(",")[0] for reason in reasons.values()} == {"reads the tables of a plan on the host"}
    assert (
        not registry.can_run(call, "cpu") and registry.can_run(call_of(), "cpu") and registry.can_run(call_of(), "auto")
    )
    with pytest.raises(BackendUnsupported, match="hopper: reads the tables"):
        choose(call, "hopper")
