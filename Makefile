# Everything sets itself up from nothing: a virtual environment, the pinned dependencies, the package.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2

.PHONY: demo test test-slow lint types format bench docs clean

demo: $(VENV)/.app
	$(BIN)/sylvester demo

# One thread a worker: the tests are many and small.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 10

test-slow: $(VENV)/.dev
	$(BIN)/pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --out docs/benchmarks.json

# Warnings are errors, and so are references to nothing.
docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	@echo docs/_build/html/index.html

$(VENV)/.app: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[app]"
	touch $@

$(VENV)/.dev: $(VENV)/.app
	$(PIP) --editable ".[dev]"
	touch $@

$(VENV)/.bench: $(VENV)/.app
	$(PIP) --editable ".[bench]"
	touch $@

$(VENV)/.docs: $(VENV)/.app
	$(PIP) --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist build docs/_build docs/generated
