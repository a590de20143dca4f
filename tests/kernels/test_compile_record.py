"""A compilation is left out only if nothing that its result follows from has changed."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from kernels import compile_record
from kernels.compile_record import Check, passes_once

from dilated_attention_pytorch.kernels.launch.launcher import OPTIONS

INPUTS = ["triton", "source", "assembler", "options", "environment"]


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """Compilations of tests below this fixture, whose record is empty and whose sample has no test."""
    monkeypatch.setattr(compile_record, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(compile_record, "is_sampled", lambda *given: False)
    monkeypatch.setattr(compile_record, "inputs_of", lambda *given: ("3.9.0", [*INPUTS]))
    monkeypatch.setenv("DAP_COMPILE", "record")
    return []


def compiling(compilations, *modules, passes=True):
    """A test that compiles kernels."""

    @passes_once(*modules)
    def test():
        Check.running.begin(None, [])
        compilations.append(1)
        assert passes

    return test


def test_equal_inputs_compile_once(compilations, monkeypatch):
    test = compiling(compilations)
    test()
    monkeypatch.delenv("DAP_COMPILE")
    test()
    assert len(compilations) == 1
    monkeypatch.setenv("DAP_COMPILE", "all")
    test()
    assert len(compilations) == 2


@pytest.mark.parametrize("changed", range(len(INPUTS)))
def test_every_input_counts(compilations, monkeypatch, changed):
    test = compiling(compilations)
    test()
    monkeypatch.delenv("DAP_COMPILE")
    other = [*INPUTS[:changed], "other", *INPUTS[changed + 1 :]]
    monkeypatch.setattr(compile_record, "inputs_of", lambda *given: ("3.9.0", other))
    test()
    assert len(compilations) == 2


def test_releases_have_records_of_their_own(compilations, monkeypatch):
    test = compiling(compilations)
    test()
    monkeypatch.setattr(compile_record, "inputs_of", lambda *given: ("3.10.0", [*INPUTS]))
    monkeypatch.delenv("DAP_COMPILE")
    test()
    assert len(compilations) == 2
    assert [*compile_record.stored()] == ["3.9.0"]


def test_names_and_texts_of_tests_count(compilations, monkeypatch, tmp_path):
    helper = tmp_path / "helper.py"
    helper.write_text("LIMIT = 96\n")
    test = compiling(compilations, SimpleNamespace(__file__=helper))
    test()
    monkeypatch.delenv("DAP_COMPILE")
    test()
    assert len(compilations) == 1
    helper.write_text("LIMIT = 64\n")
    test()
    assert len(compilations) == 2
    helper.write_text("LIMIT = 96\n")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/kernels/test_other.py::test_other[64] (call)")
    test()
    assert len(compilations) == 3


def test_failures_are_not_recorded(compilations):
    with pytest.raises(AssertionError):
        compiling(compilations, passes=False)()
    assert compile_record.stored() == {}
    assert Check.running is None


def test_a_test_with_a_record_compiles_in_one_call(compilations):
    @passes_once()
    def test():
        Check.running.begin(None, [])
        Check.running.begin(None, [])

    with pytest.raises(AssertionError, match="in one call"):
        test()


def test_every_compilation_is_repeated_at_some_commit():
    names = [f"test_fits[{number}]" for number in range(100)]
    samples = [{name for name in names if compile_record.is_sampled(name, str(commit))} for commit in range(200)]
    assert set().union(*samples) == {*names}
    assert 700 < sum(map(len, samples)) < 1300


def test_keys_follow_the_source_of_a_kernel(tmp_path):
    """The digest of Triton covers functions that a kernel calls."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    program = (
        "import triton\nimport triton.language as tl\n\n\n"
        "@triton.jit\ndef inner(x):\n    return x + 1\n\n\n"
        "@triton.jit\ndef kernel(p_x):\n    tl.store(p_x, inner(tl.load(p_x)))\n"
    )

    def source_of(text, kind="*fp32"):
        path = tmp_path / "kernels_of_a_test.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"kernels_{abs(hash(text))}", path)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return ASTSource(module.kernel, {"p_x": kind}, {}, {})

    def inputs(*sources, **options):
        compilations = [(source, OPTIONS | options) for source in sources]
        return compile_record.inputs_of(GPUTarget("cuda", 90, 32), compilations)[1]

    source, other = source_of(program), source_of(program.replace("x + 1", "x + 2"))
    plain = inputs(source)
    assert plain == inputs(source_of(program)) and triton.__version__ in plain[0]
    assert plain != inputs(other)
    assert plain != inputs(source, num_warps=8)
    assert plain != inputs(source_of(program, "*fp16"))
    assert inputs(source, other) == inputs(other, source) != plain
