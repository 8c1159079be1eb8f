# Everything a newcomer needs: make demo, make test. Each target sets up .venv first if it has to.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-all test-newest test-lowest lint format clean

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

# The same tests with the newest releases of everything, and with the oldest that pyproject.toml admits, each in an
# environment of its own. What differs between them is repaired by what both have, not by a pin.
test-newest: .venv-newest/.installed
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n auto --dist loadscope

test-lowest: .venv-lowest/.installed
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n auto --dist loadscope

# Anew each time: releases come out without a change here.
.PHONY: .venv-newest/.installed
.venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'

.venv-lowest/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-newest .venv-lowest demo .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
