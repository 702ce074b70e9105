# Two commands for a new machine with Python 3.11 or later: `make demo` and `make test`.
# Each sets itself up in .venv, once, and again when the requirements change.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.flexgen-installed
MAX_TEST_PROCESSES ?= 8
# The oldest Triton that is supported, the one that .venv has, and the newest.
TRITONS ?= 3.6.0 3.7.1 3.9.0
OFFLINE_TESTS := tests/offline tests/gluon tests/runtime/test_submit.py tests/runtime/test_launch.py

# pytest-xdist gives each core a process, so each process computes on one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-slow test-versions regen docs lint format install clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1	/p' Makefile | expand -t 16

demo: $(INSTALLED) ## compile two attention variants, show the decisions and the kernels, run and check them
	$(BIN)/python examples/demo.py

test: $(INSTALLED) ## run the everyday tests
	$(PYTEST) -n auto --maxprocesses=$(MAX_TEST_PROCESSES)

test-gpu: $(INSTALLED) ## run the tests that need a CUDA device
	$(PYTEST) -m gpu

test-slow: $(INSTALLED) ## run the tests that take minutes, on examples of their own in each run
	$(PYTEST) -m slow --hypothesis-profile default -n auto --maxprocesses=$(MAX_TEST_PROCESSES)

test-versions: $(TRITONS:%=test-triton-%) ## compile the corpus offline with each supported Triton, in environments of their own

test-triton-%: .venv-triton-%/.installed
	OMP_NUM_THREADS=1 .venv-triton-$*/bin/python -m pytest -n auto --maxprocesses=$(MAX_TEST_PROCESSES) $(OFFLINE_TESTS)

.PRECIOUS: .venv-triton-%/.installed

# An environment with one Triton of its own, and for the rest what .venv has.
.venv-triton-%/.installed: $(INSTALLED)
	@$(BIN)/python -m venv --without-pip .venv-triton-$*
	@$(BIN)/python -m pip --python .venv-triton-$*/bin/python install --quiet --disable-pip-version-check --no-deps triton==$*
	@cd .venv-triton-$* && for site in lib/python*/site-packages; do echo "$(CURDIR)/$(VENV)/$$site" >$$site/base.pth; done
	@touch $@

regen: $(INSTALLED) ## rewrite the golden files
	$(PYTEST) --regen

docs: $(INSTALLED) ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(INSTALLED) ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED) ## set up .venv

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "flexgen needs Python 3.11 or later; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON): a few minutes on a new machine"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean: ## remove .venv and everything generated
	rm -rf $(VENV) .venv-triton-* build dist *.egg-info demo_out .pytest_cache .mypy_cache .ruff_cache .hypothesis
