# Two commands do everything on a fresh machine with Python 3.11 and make:
#   make demo   sets up an environment, recovers a target and shows the result
#   make test   sets up an environment and runs lint, types and tests
# Besides: make quick runs lint and the tests that take a minute in all; make coverage lists the lines that no test
# runs; make docs builds the documentation in site/.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test quick lint types check coverage bench docs clean

demo: $(VENV)/.core
	@$(BIN)/keyhole demo --out demo-run

test: lint types check

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

quick: lint
	$(BIN)/pytest -q -n 2 --quick

check: $(VENV)/.dev
	$(BIN)/pytest -n 2

# The same tests, and the lines that none of them runs. To trace lines takes half as long again.
coverage: $(VENV)/.dev
	$(BIN)/pytest -n 2 --cov --cov-report=term

bench: $(VENV)/.dev
	$(BIN)/keyhole bench

# Every warning is an error.
docs: $(VENV)/.dev
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . site
	@echo "site/index.html is the documentation; it opens from disk"

clean:
	rm -rf $(VENV) demo-run site

$(VENV)/bin/python:
	@echo "creating the environment in $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Keyhole needs Python 3.11 or newer")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing Keyhole"
	@$(PIP) --editable '.[report]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing the development tools"
	@$(PIP) --editable '.[report,torch,transformers,onnx,http,serve,dask,data]' --group dev
	@touch $@
