# make demo: install, fetch the default model, show the same answers faster.   make test: everything .ci/run checks.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Threads that wait for each other sleep soon, so that a busy machine does not stall a pass.
export GOMP_SPINCOUNT ?= 10000

.PHONY: demo test lint bench clean

demo: $(VENV)/.installed
	$(BIN)/foredraft demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/decode.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
