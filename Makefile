# Everything sets itself up from nothing: a virtual environment, the pinned dependencies, the package.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without bytecode: of a gigabyte of modules few are imported, and those are compiled then, and kept: where the
# environment forbids that, every process would compile torch anew.
export PYTHONDONTWRITEBYTECODE :=
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint $(CONSTRAINTS)
WORKERS ?= 2

.PHONY: demo test suite test-slow lint types format bench docs gallery wheel clean

demo: $(VENV)/.app
	$(BIN)/sylvester demo

# The types are checked while the tests run, as that takes one core half a minute.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types suite

# One thread a worker: the tests are many and small.
suite: $(VENV)/.dev
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

# Warnings are errors, and so are references to nothing and cells of a tutorial that fail.
docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	@echo docs/_build/html/index.html

# The figures of docs/gallery.md, each by its example.
gallery: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python docs/gallery.py

# The wheel as others get it: tried in an environment and a folder that have never seen this checkout.
wheel: $(VENV)/.app
	rm -rf dist build/wheel && mkdir -p build/wheel/empty
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/python -m zipfile --list dist/*.whl > build/wheel/files
	for file in py.typed digits.npz template.html; do grep -q $$file build/wheel/files || exit 1; done
	! grep -E "tests/|benchmarks/|docs/" build/wheel/files
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) dist/*.whl
	cd build/wheel/empty && ../venv/bin/python -c "import torch, sylvester; \
	  print(sylvester.flows.TriangularSylvester(4)().rsample_and_log_prob((2,))[1])"
	build/wheel/venv/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) numpy "$$(ls dist/*.whl)[app]"
	cd build/wheel/empty && ../venv/bin/sylvester --version && ../venv/bin/sylvester train --epochs 1 --quiet

$(VENV)/.app: pyproject.toml $(CONSTRAINTS)
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
