# `make audit`: set up and audit the bundled MiniCPM-V 4.6 checkpoint.  `make test`: set up and pass every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The torch to set up with, such as torch==2.13.0; by default what the package's own range picks.
TORCH ?=

.PHONY: audit test lint format docs clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH) -e '.[dev]'
	touch $@

audit: $(VENV)/ready
	$(BIN)/python fixtures/make.py
	$(BIN)/ckaudit names fixtures/minicpm-v-4.6

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python fixtures/make.py
	$(BIN)/pytest -n auto

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Sample outputs and the picture in the documentation, made by the program.
docs: $(VENV)/ready
	$(BIN)/python fixtures/make.py
	$(BIN)/python docs/regenerate.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
