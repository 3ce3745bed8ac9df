# Every target that needs the environment makes it first: .venv, beside this file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
UV := $(BIN)/uv pip install --no-config --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt

.PHONY: help venv peers bench test nightly lint format clean

help:
	@echo "make bench    make the environment if needed, then measure the main job on this machine"
	@echo "make test     make the environment if needed, then run the tests"
	@echo "make lint     ruff and mypy"
	@echo "make nightly  the slow tests: soaks and large property tests"
	@echo "make peers    also install the peers that 'bench --peers' compares with (DALI, TensorFlow)"
	@echo "make format   let ruff rewrite what it can"
	@echo "make clean    remove the environment and what the tools left"

# uv resolves the CUDA builds of torch and torchvision together, which also run without a GPU.
$(READY): pyproject.toml constraints.txt
	@echo "==> making the environment in $(VENV) (about 6 GB, a minute or two)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@$(UV) --editable ".[dev]"
	@touch $(READY)

$(PEERS): $(READY)
	@echo "==> installing the peers: DALI and TensorFlow"
	@$(UV) --editable ".[dev,dali,tf]"
	@touch $(PEERS)

venv: $(READY)

peers: $(PEERS)

bench: $(READY)
	@echo "==> python -m fastpipe.bench"
	@$(BIN)/python -m fastpipe.bench

test: $(READY)
	@echo "==> pytest"
	@$(BIN)/python -m pytest -q

nightly: $(READY)
	@echo "==> pytest, the slow tests"
	@FASTPIPE_HYPOTHESIS=nightly $(BIN)/python -m pytest -q -m slow

lint: $(READY)
	@echo "==> ruff and mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
