# Every way to build and check this project; `make` alone explains them. CI calls the same targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Exists when the environment is complete; every target that needs the environment depends on it.
READY := $(VENV)/.ready
# Native loops and the forwarder of virtual hosts, compiled along with the installation.
NOT_BUILT := collectives/kernels/not-built.txt bench/hosts/forwarder/not-built.txt
LOOPS := bench/hosts/forwarder/__init__.py bench/hosts/forwarder/native/* collectives/kernels/build.py collectives/kernels/native/* collectives/payloads/codec/native/* compressors/kernels/native/*

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-network check test exhaustive coverage sanitize triton bench-ci bless published published-quick attack resume-sweep lint format docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv and install everything into it (PYTHON=python3.12 chooses the interpreter)

demo: $(READY) ## does compression pay on a 50 Mbit/s link? bench decide on real data (2 minutes; OUT=folder)
	@PATH="$(abspath $(BIN)):$$PATH" examples/demo.sh $(OUT)

demo-network: $(READY) ## step time and bytes of ResNet-18 on four virtual hosts at 100 Mbit/s, six methods (under 5 minutes)
	@PATH="$(abspath $(BIN)):$$PATH" examples/demo_network.sh

check: lint ## check style, types and layers, and run the quick unit tests
	@$(BIN)/python -m pytest -q -m "not long and not slow" --numprocesses 3 --dist loadgroup tests/unit

test: lint ## check style, types and layers, then run all tests but the long ones
	@$(BIN)/python -m pytest -q --numprocesses 3 --dist loadgroup

exhaustive: $(READY) ## the tests that CI does not wait for; every native loop against the reference path with 10 000 random inputs
	@$(BIN)/python -m pytest -q -m long --numprocesses 2
	@$(BIN)/python -m pytest -q -m loops --cases 10000 --timeout 0 --numprocesses 2 tests/unit/compressors tests/unit/collectives

coverage: $(READY) ## lines and branches that the tests execute, in every process (half an hour)
	@$(BIN)/python -m pytest -q --numprocesses 2 --dist loadgroup --cov --cov-report=term

sanitize: $(READY) ## the same tests under the address and undefined-behaviour sanitizers (needs cc)
	@$(BIN)/python -m tests.sanitize

triton: $(READY) ## hold the kernels for GPUs against the reference path: on a GPU, or by Triton's interpreter; and compile them
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt triton
	@$(BIN)/python -m pytest -q -m triton --cases 4000 --timeout 0 --numprocesses 2 tests/unit/compressors/test_triton.py
	@$(BIN)/python -m tests.compile_kernels

bench-ci: $(READY) ## short runs, compared with results/reference/ci.csv: bytes and accuracy must repeat (30 s)
	@$(BIN)/python -m benchmarks.ci

bless: $(READY) ## what these runs measure now becomes results/reference/ci.csv
	@$(BIN)/python -m benchmarks.ci --bless

published: $(READY) ## the four published systems, claim by claim: sweeps and pages, some hours (ONLY=system for one)
	@$(BIN)/python -m benchmarks.published $(if $(ONLY),--only $(ONLY))

published-quick: $(READY) ## a tenth of that in 10 minutes; the pages go to results/runs/published-quick/pages
	@$(BIN)/python -m benchmarks.published --quick $(if $(ONLY),--only $(ONLY))

attack: $(READY) ## kill, starve and feed nonsense to every part for under half an hour (SEED=n)
	@$(BIN)/python -m tests.attack --seed $(or $(SEED),1)

resume-sweep: $(READY) ## stop and resume 40 runs at moments drawn by chance, for up to an hour (SEED=n)
	@$(BIN)/python -m tests.attack --seed $(or $(SEED),1) --only resumes --minutes 60

lint: $(READY) ## check style, types and layers
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@PYTHONPATH=. $(BIN)/lint-imports --no-logo --no-cache

format: $(READY) ## rewrite the sources in the common style
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

docs: $(READY) ## build the documentation into build/site, which needs no web server and no network; a broken link or anchor, or a page outside the navigation, fails
	@log=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1) || { echo "$$log" >&2; exit 1; }

clean: ## remove the environment, caches and build outputs; results and data stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt setup.py $(wildcard $(LOOPS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is missing or older than 3.11; name another one with PYTHON=" >&2; exit 1; }
	@echo "installing into $(VENV); PyTorch is large, so the first time takes some minutes"
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
		{ $(PYTHON) -m venv $(VENV) && \
		$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'; } \
		>"$$log" 2>&1 || { cat "$$log" >&2; exit 1; }
	@for note in $(NOT_BUILT); do if [ -e $$note ]; then echo "note: the native code in $${note%/*} is missing: $$(cat $$note)" >&2; fi; done
	@touch $@
