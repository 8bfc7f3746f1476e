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

bench: .venv/.installed-test
	$(BIN)/python -m benchmarks

# Twenty minutes of random rounds with faults put in; the counts go to docs/reliability.md.
soak: .venv/.installed-test
	$(BIN)/python -m benchmarks.soak

# Other packages, in folders of their own; what cannot be installed is said on the pages.
PEERS := prodigyopt schedulefree dadaptation curvlinops-for-pytorch backpack-for-pytorch torch-levenberg-marquardt \
  pytorch-minimize eclipse-nn einconv einops unfoldNd tqdm pytorch_lightning lightning_utilities torchmetrics fsspec \
  linear_operator jaxtyping wadler_lindig typeguard
build/peers:
	for each in $(PEERS); do $(BIN)/python -m pip install --quiet --no-deps --target $@ $$each || echo "without $$each"; done

build/autobound:
	$(PYTHON) -m venv $@ && $@/bin/pip install --quiet autobound typing_extensions jax==0.4.18 jaxlib==0.4.18 \
	  'numpy<2' 'scipy<1.13' || { rm -rf $@; echo "without autobound"; }

peers: .venv/.installed-test build/peers build/autobound
	$(BIN)/python -m docs.peers

# Goes on where it was cut off; make training OPTIONS="--quick --seeds 1" takes a quarter of an hour.
training: .venv/.installed-test build/peers
	$(BIN)/python -m docs.training --jobs 2 $(OPTIONS)
	$(BIN)/python -m docs.minibatches --jobs 2

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
