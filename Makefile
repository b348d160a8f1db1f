# `make demo` and `make test` set themselves up: Python 3.11 or newer and make are all they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow test-gpu coverage lint types check clean

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

demo: $(STAMP)
	$(BIN)/expertcast demo

test: $(STAMP)
	$(PYTEST) -m "not slow"

# whole commands and scripts, kills and two processes: ten to sixty seconds each
test-slow: $(STAMP)
	$(PYTEST) -m slow

coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term --cov-fail-under=85

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

check: test test-slow lint types

clean:
	rm -rf $(VENV)

# One pip run with the constraints file: torch's pin must be known before anything asks for torch.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	@touch $(STAMP)
