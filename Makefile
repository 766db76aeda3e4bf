# `make serve` and `make test` are all a newcomer needs; both work on a machine that has only
# Python 3.11 to 3.13 with venv, make and git.
PYTHON ?= python3
PORT ?= 8000
STORE ?=
VENV := .venv
BIN := $(VENV)/bin
# A GPU machine gets the runtime that can use it; the two runtimes are one package and exclude each other.
RUNTIME := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: serve test check demo bench zoo-table clean

serve: $(VENV)/.serve
	$(BIN)/convoy serve --port $(PORT) $(if $(STORE),--store $(STORE))

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not gpu"

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not gpu and not slow"

demo: $(VENV)/.dev
	$(BIN)/python -m loadtest.demo

bench: $(VENV)/.dev
	$(BIN)/python -m loadtest.startup

# Hours, at the lowest priority; a second call goes on where the first one stopped.
zoo-table: $(VENV)/.dev
	nice -n 19 $(BIN)/python -m export.zoo_table

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[$(RUNTIME)]'
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP_INSTALL) --editable '.[$(RUNTIME),export,dev]'
	touch $@
