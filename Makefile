# make demo: install, fetch the default model, show the same answers faster.   make test: everything .ci/run checks.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Threads that wait for each other sleep soon, so that a busy machine does not stall a pass.
export GOMP_SPINCOUNT ?= 10000

PEER_ARMS = foredraft:plain,foredraft:auto,openvino:plain,openvino:ngram,vllm:plain,llamacpp:plain:q8_0,llamacpp:plain:q4_1

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

# Beside other engines too: make bench PEERS=directory with their scripts (benchmarks/peers.py says how).
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/decode.py --arms plain,suffix,eagle,eagle+suffix
	$(BIN)/python benchmarks/steps.py
	$(if $(PEERS),$(BIN)/python benchmarks/peers.py --scripts $(PEERS) --arms $(PEER_ARMS))

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[measure,serve]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
