# make demo          the comparison of all formulations on the embedded corpus -> results/demo
# make demo QUICK=1  the same in a minute or two, too short for its figures to mean anything
# make test          lint, types, tests
#
# Both create .venv if there is none and install this package into it, editable, with the
# versions in constraints.txt.  Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

DEMO_COMMAND = compare --config reranker --config reranker/demo --rows reranker/demo_rows
DEMO_ARGS    ?= --output results/demo
ifdef QUICK
DEMO_ARGS    := --trainer.max_steps 5 --trainer.limit_test_batches 5 --output results/demo-quick
endif
PYTEST_ARGS  ?=

.PHONY: demo test lint types pytest clean

demo: $(VENV)/.installed-demo
	$(BIN)/pl-pointwise $(DEMO_COMMAND) $(DEMO_ARGS)

test: lint types pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow the mapping of an editable install, so it gets a copy laid out as users
# get it.  build/ goes first: setuptools would carry files over that no longer exist.
types: $(VENV)/.installed-test
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target build/types .
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p pl_pointwise

pytest: $(VENV)/.installed-test
	$(BIN)/pytest $(PYTEST_ARGS)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -e '.[$*]' -c constraints.txt
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "constraints.txt \
	needs Python 3.11 or newer, and '$(PYTHON)' is not; name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
