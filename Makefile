# `make quickstart` is the whole way from a clone to a leaderboard.
PYTHON ?= python3.11
BIN := .venv/bin
PYTEST_ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all lint format reference clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/.installed  ## make .venv with the versions of constraints.txt

# Ray installs a script named `tune` as well: the project is written last, so that .venv/bin/tune is ours.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall -e .
	@touch $@

quickstart: install  ## a small search on this machine, in a few minutes
	$(BIN)/tune run search_spaces/quickstart.yaml

# Those that need Ray wait for processes most of the time: the others run beside them.
test: install  ## the tests that need no GPU and take no minutes
	@log=$$(mktemp); \
	$(BIN)/python -m pytest -m 'ray and not slow and not gpu' $(PYTEST_ARGS) > $$log 2>&1 & with_ray=$$!; \
	$(BIN)/python -m pytest -m 'not ray and not slow and not gpu' $(PYTEST_ARGS); without=$$?; \
	wait $$with_ray; with=$$?; cat $$log; rm $$log; \
	test $$without = 0 || echo 'tests without Ray failed, see above'; \
	test $$without = 0 -a $$with = 0

test-all: install  ## every test that this machine can run
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: install  ## style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict tuner trainables

format: install  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

reference: install  ## make the README's tables of keys from the docstrings
	$(BIN)/python -m tuner.reference

clean:  ## remove .venv and caches; studies/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
