# Everything a newcomer needs: make demo, make test. Each target sets up .venv first if it has to.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-all lint format clean

setup: .venv/.installed

# Made anew only when what it installs has changed.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/co2 demo

# One test process for each core, and one thread for each process: small tensors gain nothing from more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadscope

test: setup
	$(PYTEST)

test-all: setup
	$(PYTEST) -m 'not gpu'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
