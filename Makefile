# Two commands on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint format readme docs bench peers soak training clean

demo: .venv/.installed-all
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: .venv/.installed-test
	$(BIN)/python docs/generate.py

docs: .venv/.installed-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# NAMES="tightness convergence": other tables; `python -m benchmarks --list` says which there are.
bench: .venv/.installed-test
	$(BIN)/python -m benchmarks $(or $(NAMES),speed durations)

# Twenty minutes of random rounds with faults put in; the counts go to docs/reliability.md.
soak: .venv/.installed-test
	$(BIN)/python -m benchmarks.soak

# Other packages, in a folder of their own; what cannot be installed is left out of the tables.
PEERS := prodigyopt schedulefree dadaptation curvlinops-for-pytorch backpack-for-pytorch torch-levenberg-marquardt \
  pytorch-minimize eclipse-nn einconv einops unfoldNd tqdm pytorch_lightning lightning_utilities torchmetrics fsspec \
  linear_operator jaxtyping wadler_lindig typeguard
build/peers:
	for each in $(PEERS); do $(BIN)/python -m pip install --quiet --no-deps --target $@ $$each || echo "without $$each"; done

peers: .venv/.installed-test build/peers
	$(BIN)/python -m benchmarks peers lipschitz

# Some hours; all benchmarks go on where they were cut off, as long as the code is the same.
training: .venv/.installed-test build/peers
	$(BIN)/python -m benchmarks training minibatches --jobs 2
	$(BIN)/python -m benchmarks.training

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build docs/gallery docs/operations.rst docs/command-line.md

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/.installed-all: .venv/.installed
	$(PIP) --editable '.[all]'
	touch $@

.venv/.installed-docs: .venv/.installed
	$(PIP) --editable '.[docs]'
	touch $@

.venv/.installed-test: .venv/.installed
	$(PIP) --editable '.[test]'
	touch $@
