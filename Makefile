# Two targets do everything from a bare clone: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
BIN    := $(VENV)/bin
LOWEST := $(VENV)-lowest
OLD    := -W ignore::DeprecationWarning -W ignore::FutureWarning
export FISHERFOLD_DATA ?= $(wildcard $(abspath ../shared/data))
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help setup demo test test-slow coverage unit doctest lint types imports docs gallery fuzz bench integrations wheel clean audit lowest

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# the package with its plots and its service is enough for the demo; the tools come with the tests
$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[plots,serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,docs]'
	@touch $@

setup: $(VENV)/.dev ## create the virtual environment with all tools

demo: $(VENV)/.runtime ## recommend films, train a network, fit a model on a manifold: tables, a picture, a page
	$(BIN)/python -m fisherfold demo

test: lint types imports audit unit doctest docs ## what CI checks on every change, in three minutes

unit: $(VENV)/.dev
	$(BIN)/python -W error -c "import fisherfold"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

test-slow: $(VENV)/.dev ## the tests that take long: hostile sweeps, kills, several processes, notebooks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "slow and not hours"

coverage: $(VENV)/.dev ## branch coverage by package, of the tests of make test (TESTS=all: of the slow ones too)
	$(BIN)/coverage erase
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -q -n $(JOBS) --dist worksteal $(if $(TESTS),-m "slow or not slow")
	$(BIN)/coverage combine -q
	$(BIN)/coverage json -q -o build/coverage.json
	$(BIN)/python .ci/coverage_table.py build/coverage.json

integrations: $(VENV)/.dev ## the optimizers in Lightning, Accelerate, Transformers and timm; kernels, interpreted
	$(BIN)/pip install -q -c constraints.txt -e '.[integrations]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m "slow or not slow" tests/optim/test_fused.py

# kernels need Triton, which comes with the integrations
doctest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --doctest-modules src/fisherfold --ignore src/fisherfold/optim/kernels.py --ignore src/fisherfold/optim/fused.py

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

audit: $(VENV)/.dev ## check the lock file against pyproject.toml
	$(BIN)/python .ci/lock.py --check

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

docs: $(VENV)/.dev ## build the documentation, warnings are errors
	PYTHONPATH=docs/_extensions $(BIN)/zensical build --strict

gallery: $(VENV)/.dev ## run the examples, make their pictures and docs/gallery.md
	OMP_NUM_THREADS=1 $(BIN)/python examples/_gallery.py

bench: $(VENV)/.dev ## run every benchmark on tiny data, to see that it runs
	$(BIN)/python -m benchmarks run --all --smoke

fuzz: $(VENV)/.dev ## five minutes of damaged models, checkpoints and tables
	OMP_NUM_THREADS=1 $(BIN)/python fuzz/run.py --minutes 5

wheel: $(VENV)/.dev ## build the wheel, install it elsewhere and test what was installed
	bash .ci/test_wheel

# old versions warn about each other, so warnings are no errors here; the peers of the dev extra are left out, since they
# need newer versions than fisherfold does; pyparsing must be older than 3.3 for the oldest matplotlib
lowest: ## the tests with the lowest versions that pyproject.toml admits (tried with Python 3.11; not part of make test)
	$(PYTHON) -m venv --clear $(LOWEST)
	grep -oE '"(pandas|pyarrow)>=[0-9.]+"' pyproject.toml | tr -d '",' | sed 's/>=/==/' > $(LOWEST)/lowest.txt
	(sed -n '/^dependencies/,/^]/p' pyproject.toml; grep -E '^(plots|download|serve) =' pyproject.toml) | grep -oE '[a-z_-]+>=[0-9.]+' | sed 's/>=/==/' >> $(LOWEST)/lowest.txt
	$(LOWEST)/bin/pip install -q -c $(LOWEST)/lowest.txt -e '.[plots,download,serve]' httpx pytest pytest-xdist hypothesis pandas pyarrow 'pyparsing<3.3'
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -n $(JOBS) --dist worksteal $(OLD)
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q --doctest-modules src/fisherfold --ignore src/fisherfold/manifolds/adapter.py $(OLD)

clean:
	rm -rf $(VENV) $(LOWEST) build dist site .cache demo-output .pytest_cache .mypy_cache .ruff_cache
