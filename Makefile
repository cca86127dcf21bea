# `make test` and `make demo` work on a fresh machine; everything is installed into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=
SOAK_ARGS ?= --minutes 30 --kills 200

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv pip install --python $(BIN)/python
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --upgrade --quiet \
	--no-header --no-annotate --no-emit-index-url --generate-hashes

export UV_HTTP_TIMEOUT ?= 300
export PYRIGHT_PYTHON_IGNORE_WARNINGS ?= 1

.PHONY: help setup test lint style types checks format bench coverage-table soak demo docs lock clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/package.stamp  ## install everything into .venv (again only when the lock changed)

$(VENV)/uv.stamp: requirements/uv.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fasterisnet needs Python 3.11 or newer; name one with: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

$(VENV)/lock.stamp: requirements/lock.txt $(VENV)/uv.stamp
	$(UV) --compile-bytecode --require-hashes -r requirements/lock.txt
	@touch $@

$(VENV)/package.stamp: pyproject.toml $(VENV)/lock.stamp
	$(UV) --quiet --no-deps --no-build-isolation -e .
	@touch $@

test: style  ## ruff, pyright and all tests
	@$(MAKE) --no-print-directory --jobs 2 types checks

lint: style types  ## ruff (lint and format) and pyright

style: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/pyright --project pyproject.toml

# Beside pyright, which has one core and half a minute to itself otherwise.
checks: setup
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

format: setup  ## let ruff repair style and layout
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup  ## what a training step with heatmaps costs
	$(BIN)/python benchmarks/step_cost.py

coverage-table: setup  ## check every torchvision and many timm models, write docs/coverage.md
	$(BIN)/python benchmarks/coverage.py

soak: setup  ## kill runs at random, 200 times or for an hour, and compare them with runs that were left alone (SOAK_ARGS=...)
	$(BIN)/python benchmarks/soak.py $(SOAK_ARGS)

demo: setup  ## train a classifier that cheats and one that does not, and show where both look (3 minutes)
	$(BIN)/fasterisnet demo --out runs/demo

docs: setup  ## the guide as a site, into site/ (no network)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: $(VENV)/uv.stamp  ## resolve the requirements anew (rewrites requirements/*.txt)
	$(COMPILE) requirements/uv.in -o requirements/uv.txt
	$(COMPILE) pyproject.toml --all-extras requirements/dev.in -o requirements/lock.txt

clean:  ## remove caches and built files (.venv and runs/ stay)
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find . \( -name .venv -o -name .git -o -name runs \) -prune -o \
		\( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +
