# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-gpu bench models lint install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch and what the project needs. The first time takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	touch $(STAMP)

demo: $(STAMP)  ## train a Llama twice, stock and patched, and plot both
	$(BIN)/tigon demo $(ARGS)

test: $(STAMP)  ## everything a machine without a GPU can show
	$(BIN)/python -m pytest tests --ignore tests/gpu --numprocesses 2 $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/ops --numprocesses 2 $(ARGS)

test-gpu: $(STAMP)  ## the ops and what only a GPU can show
	$(BIN)/python -m pytest tests/ops tests/gpu $(ARGS)

bench: $(STAMP)  ## time every op against its peers
	$(BIN)/tigon bench $(ARGS)

models: $(STAMP)  ## write docs/models.md: what is replaced in every model type
	$(BIN)/tigon inspect --all --out docs/models.md

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache
