# Two commands from nothing but Python 3.11+ and the package registry:
#   make demo    sets everything up in .venv and answers six prompts with a real model
#   make test    sets everything up and runs all tests
# PYTHON=python3.12 VENV=.venv-3.12 JAX=0.11.2 picks another interpreter, folder or JAX; QUICK= has every test compile as
# users do, which takes half as long again.

PYTHON ?= python3
VENV ?= .venv
JAX ?=
WORKERS ?= 2
QUICK ?= yes
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed
JAX_PIN := $(if $(JAX),jax==$(JAX),jax)

.PHONY: demo test heavy check format bench wheel clean help

help:
	@sed -n '1,6p' Makefile
	@echo "also: make check (lint and types), make format, make heavy (longer sweeps), make bench, make wheel, make clean"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvjax needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(STAMP)-models: pyproject.toml | $(BIN)/python
	@echo "installing kvjax and what the decoder needs into $(VENV)"
	$(PIP) "$(JAX_PIN)" -e ".[models]"
	@touch $@

# JAX and jax-triton are resolved in one go, so that neither moves the other's version. The CUDA plugin compiles for an
# H200 without one; it has to be of the installed JAX's version.
$(STAMP)-test: pyproject.toml | $(BIN)/python
	@echo "installing kvjax, the test tools and the deviceless GPU compiler into $(VENV)"
	$(PIP) "$(JAX_PIN)" -e ".[test]"
	version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("jax"))') && \
	$(PIP) "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version"
	@touch $@ $(STAMP)-models

$(STAMP)-dev: $(STAMP)-test
	$(PIP) "$(JAX_PIN)" -e ".[dev]"
	@touch $@

demo: $(STAMP)-models
	$(BIN)/python -m models.demo

# XLA takes its flags once per process. So the tests of what programs compute compile quickly and run first, and those
# that look at programs as users have them run in processes of their own (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
test: $(STAMP)-test
ifeq ($(QUICK),)
	$(PYTEST) $(PYTEST_FLAGS)
else
	$(PYTEST) --quick-compile $(PYTEST_FLAGS)
	$(PYTEST) -m compiled $(PYTEST_FLAGS)
endif

heavy: $(STAMP)-test
	$(PYTEST) -m "heavy or volume" --heavy $(PYTEST_FLAGS)

check: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --venvpath . --project pyproject.toml

format: $(STAMP)-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)-models
	$(BIN)/python -m benchmarks --help

wheel: $(STAMP)-dev
	$(PIP) build
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv .venv-* dist build out .pytest_cache .ruff_cache .hypothesis
