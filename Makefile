# Everything a contributor runs. A bare machine needs Python 3.11 or newer and make; the rest goes into .venv.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
SOAK_ARGS ?=
PROOF_ARGS ?=
CAMPAIGN_ARGS ?=
# For how long `make proof` looks at pairs, and at three at once, on each database; and runs the campaign on each.
PROOF_SECONDS ?= 600
# What `make test` runs: web servers, workers and browsers are left to `make test-all`.
TESTS ?= tests/unit tests/contract tests/backends
# On which servers: none, or all that answer.
SERVERS ?= none
# Test processes at once. Most tests wait more than they work, but servers and browsers beside them work too.
WORKERS ?= $(if $(filter none,$(SERVERS)),10,6)

BIN := $(VENV)/bin
DEV := $(VENV)/.installed-dev
DEMO := $(VENV)/.installed-demo

# Only when given: an empty DATABASE_URL is not the same as none.
ifdef DATABASE_URL
export DATABASE_URL
endif

# Tests start hundreds of processes: none is to compile the package anew.
test test-all soak proof: export PYTHONDONTWRITEBYTECODE =

.PHONY: help deps test test-all soak proof lint docs format migrations demo screenshots clean
.DEFAULT_GOAL := help

help:
	@echo "make test        run the tests that need no server       PYTEST_ARGS='-k name'"
	@echo "make test-all    run all tests, on every server that answers"
	@echo "make soak        run the long tests             SOAK_ARGS='-k name'"
	@echo "make proof       run clients in every order of their statements      PROOF_SECONDS=600 PROOF_ARGS='-k pair'"
	@echo "                 then the campaign of faults                         CAMPAIGN_ARGS='--fault kill stop'"
	@echo "make lint        check style, types, layers, migrations and the documentation"
	@echo "make docs        build the site of the documentation in docs/_build/html"
	@echo "make format      format the code"
	@echo "make demo        run the example project        DATABASE_URL=postgres://...  DEMO_ARGS='--seconds 10'"
	@echo "make screenshots take the pictures of docs/images again, with Chromium"
	@echo "make clean       remove the virtual environment and caches"

# The command is a file of the environment, so a half-made one is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# pip 25.1 is the first that knows dependency groups.
$(DEV): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

$(DEMO): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group demo
	@touch $@

deps: $(DEV)

test: $(DEV)
	SQLSEM_TEST_SERVERS=$(SERVERS) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS) $(PYTEST_ARGS)

test-all:
	$(MAKE) test TESTS=tests SERVERS=all

soak: $(DEV)
	$(BIN)/python -m pytest -m soak --timeout 3600 $(SOAK_ARGS)

proof: $(DEV)
	PROOF_SECONDS=$(PROOF_SECONDS) $(BIN)/python -m pytest -m soak -s --timeout 36000 tests/proof $(PROOF_ARGS)
	$(BIN)/python -m tests.proof.campaign --seconds $(PROOF_SECONDS) $(CAMPAIGN_ARGS)

lint: $(DEV)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python docs/words.py
	$(BIN)/python manage.py makemigrations --check --dry-run
	$(MAKE) docs

docs: $(DEV)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs docs/_build/html

format: $(DEV)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

migrations: $(DEV)
	$(BIN)/python manage.py makemigrations sqlsem

demo: $(DEMO)
	$(BIN)/python manage.py demo $(DEMO_ARGS)

screenshots: $(DEV)
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		EXAMPLE_VAR_DIR=$$folder $(BIN)/python manage.py screenshots

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
