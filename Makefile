# Needs Python 3.11+ and make. `make demo` and `make test` build their own environment in .venv.
#   make demo PIP_ARGS='...'   passes extra arguments to pip      make test WORKERS=1   runs the tests in one process
.DEFAULT_GOAL := help
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
SRC := src/dilated_attention_pytorch
PACKAGE := dilated_attention_pytorch
PIP_ARGS ?=
WORKERS ?= auto
PYTEST_ARGS ?=
# Tests that share one run of a kernel interpreter go to one worker.
SPREAD = -n $(WORKERS) --maxprocesses 8 --dist loadgroup
# Where annotated shapes are checked while the tests run. Patterns and plans take what users write and check it themselves;
# a Triton kernel wrapped by the checker would lose its globals.
CHECKED := $(PACKAGE).ops,$(PACKAGE).nn,$(PACKAGE).kernels.reference,$(PACKAGE).kernels.cpu.tiles,$(PACKAGE).selection.attention,$(PACKAGE).selection.rank,$(PACKAGE).selection.distill,$(PACKAGE).selection.row_scores
# A user's own PYTHONPATH could shadow the library under test.
unexport PYTHONPATH

# $(call timed,what,command): say what is being done, do it, say how long it took, keep its exit status.
timed = @printf '== %s\n' '$(1)'; begun=$$(date +%s); { $(2); }; status=$$?; \
	word=done; [ $$status -eq 0 ] || word=FAILED; \
	printf '== %s: %s in %s s\n' '$(1)' $$word $$(($$(date +%s) - begun)); exit $$status

.PHONY: help setup demo test lint bench docs sizes release-check clean

help:
	@printf '%s\n' 'make setup   create .venv, install, build the C++ kernel' \
	 'make demo    a tour in under five minutes; writes demo/report.html and demo/pattern.html' \
	 'make test    every test' 'make lint    ruff and pyrefly' \
	 'make bench   measure this machine into benchmarks/results/cpu.jsonl' \
	 'make docs    check the documents, run their code blocks, build the site into build/site' \
	 'make sizes   lower the sizes and counts in tests/sizes.json to the present ones' \
	 'make release-check   what continuous integration checks, and a random half of the planted bugs' \
	 'make clean   remove what the other targets made, except .venv'

$(VENV)/installed: pyproject.toml constraints.txt
	$(call timed,installing into $(VENV) (a few minutes the first time),\
	  sh .ci/venv $(VENV) && $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	    --constraint constraints.txt --editable '.[dev]')
	@touch $@

# A machine without a compiler is a machine with the pure torch path: the reason is printed and the set-up goes on.
$(VENV)/native: $(VENV)/installed $(wildcard $(SRC)/kernels/cpu/native*)
	$(call timed,building the C++ kernel,\
	  $(BIN)/python -m $(PACKAGE).kernels.cpu.native || echo 'The C++ kernel was not built (reason above); the pure torch path runs instead.')
	@touch $@

setup: $(VENV)/native
	@printf '== ready: %s\n' '$(BIN)/python'

demo: $(VENV)/native
	$(call timed,running the demo,$(BIN)/python benchmarks/demo.py --out demo/report.html)

# Runtime shape checkers break torch.compile(fullgraph=True), so tests that compile run apart, first:
# the last lines are then the summary of the long run. Only files that hold such tests are collected.
test: $(VENV)/native
	@printf '== compile tests, shape checks off\n'
	@JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -q $(SPREAD) -m compile $(PYTEST_ARGS) $$(grep -rl mark.compile tests) || [ $$? -eq 5 ]
	@printf '== all other tests, shape checks on\n'
	@$(BIN)/python -m pytest -q $(SPREAD) --jaxtyping-packages=$(CHECKED),beartype.beartype \
	  -m 'not compile' $(PYTEST_ARGS)

lint: $(VENV)/installed
	$(call timed,ruff check,$(BIN)/ruff check .)
	$(call timed,ruff format --check,$(BIN)/ruff format --check .)
	$(call timed,pyrefly check,$(BIN)/pyrefly check --summary=none)

bench: $(VENV)/native
	$(call timed,measuring this machine (about a quarter of an hour),\
	  $(BIN)/python -m $(PACKAGE).tools.bench --suite cpu --out benchmarks/results/cpu.jsonl)

docs: $(VENV)/native
	$(call timed,building the site into build/site,$(BIN)/python docs/build_site.py)
	$(call timed,checking links and code blocks of the documents,$(BIN)/python -m pytest -q tests/test_docs.py)

sizes: $(VENV)/installed
	@$(BIN)/python benchmarks/sizes.py

release-check: $(VENV)/native
	.ci/run
	$(call timed,planting a random half of the known bugs,$(BIN)/python benchmarks/mutants.py --half)

clean:
	$(call timed,removing caches and demo output,\
	  rm -rf demo build dist .pytest_cache .ruff_cache .hypothesis $(VENV)/native && \
	  find src tests -name __pycache__ -type d -prune -exec rm -rf {} +)
