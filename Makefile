# One command each; every target sets up what it needs in .venv, once. `make help` lists them.
#
# Variables: PYTHON (the interpreter .venv is made with), VENV, JOBS (test processes).

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PYTEST := $(BIN)/python -m pytest
# pytest's processes share the cores, so one thread each; tests of threading set their own number
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

ENGINE_SOURCES := CMakeLists.txt $(wildcard src/embedfuse/cpu/*.cpp src/embedfuse/cpu/*.h src/embedfuse/cpu/*/*.h src/embedfuse/kernels/*.cpp src/embedfuse/kernels/*.h)
TORCH := $(shell grep '^torch==' constraints.txt)
SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
# tests of the parts that load no engine
QUICK := $(wildcard $(patsubst %,tests/test_%.py,config plan combiners reference optim tolerance imports))
LESSER_ISAS = $(shell $(BIN)/python -c 'from embedfuse.cpu import isa, isas; print(*sorted({*isas()} - {isa()}))')
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
OTHER := build/venv-torch-$(TORCH_VERSION)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help dev test lint format test-quick test-isa test-all test-gpu test-torch demo bench wheel clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# --- set-up ----------------------------------------------------------------------------------------------------------

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "embedfuse needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and by version: left to choose, pip may take a build that brings gigabytes of GPU libraries
$(VENV)/.base: $(VENV)/.made constraints.txt
	$(PIP) install --quiet -c constraints.txt $(TORCH)
	$(PIP) install --quiet -c constraints.txt $(BUILD_TOOLS)
	touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@ $(VENV)/.engine

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[demo]'
	touch $@ $(VENV)/.engine

# Python files are read where they lie; C++ is compiled again when it changes
$(VENV)/.engine: $(VENV)/.base $(ENGINE_SOURCES)
	$(PIP) install --quiet --no-build-isolation --no-deps -e .
	touch $@

dev: $(VENV)/.dev $(VENV)/.engine ## set up .venv with everything

# --- checks ----------------------------------------------------------------------------------------------------------

test: lint test-quick test-isa wheel test-all ## all that CI runs; what fails soonest comes first

lint: dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: dev ## let ruff format, and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-quick: dev ## what needs no engine
	$(ONE_THREAD) $(PYTEST) -q -x $(QUICK)

# every other test runs with the best instruction set of this machine; here the lesser ones have their turn
test-isa: dev ## the C++ engine without its faster instruction sets
	for isa in $(LESSER_ISAS); do \
		EMBEDFUSE_CPU_ISA=$$isa $(ONE_THREAD) $(PYTEST) -q -x tests/test_ops.py -k cpu-cpu || exit; \
	done

test-all: dev ## every test
	$(ONE_THREAD) $(PYTEST) -q -n $(JOBS) --dist worksteal

test-gpu: dev ## what needs a GPU
	$(PYTEST) -q -m gpu

# other versions of PyTorch bring other compilers and other Tritons, whose interpreters may not know NumPy 2.4
test-torch: ## the PyTorch front with another PyTorch: make test-torch TORCH_VERSION=2.9.0
	$(if $(TORCH_VERSION),,$(error set TORCH_VERSION, for example to 2.9.0))
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH_VERSION) $(BUILD_TOOLS)
	$(OTHER)/bin/python -m pip install --quiet --no-build-isolation '.[torch,cli,test]' 'numpy<2.4'
	$(ONE_THREAD) $(OTHER)/bin/python -m pytest -q -n $(JOBS) --dist worksteal tests/front

# --- the rest --------------------------------------------------------------------------------------------------------

demo: $(VENV)/.demo $(VENV)/.engine ## train a DLRM on real flights, fused against unfused
	$(BIN)/embedfuse train --model dlrm --data flights --compare --out runs/flights

bench: dev ## time the C++ engine here, against PyTorch
	$(BIN)/python benchmarks/cpu_engine.py

wheel: build/.wheel-tried ## build the sdist, a wheel from it, and try that without PyTorch

build/.wheel-tried: $(VENV)/.dev $(ENGINE_SOURCES) pyproject.toml scripts/check_wheel.py
	rm -rf dist build/check
	mkdir -p dist
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	$(PIP) install --quiet --no-deps --target build/check dist/*.whl
	PYTHONPATH=build/check:$(SITE) $(BIN)/python -S scripts/check_wheel.py
	touch $@

clean: ## remove builds and caches, not .venv
	rm -rf build dist wheelhouse .pytest_cache .mypy_cache .ruff_cache .hypothesis
