# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Another version of transformers than that of constraints.txt, with a venv of its own.
TRANSFORMERS ?= 5.23.0
OTHER := .venv-transformers-$(TRANSFORMERS)

# What Triton's interpreter runs: the kernels, and which bytes are kept with them.
BY_KERNELS := tests/ops tests/memory/test_bytes.py tests/plan/test_plan.py::test_kept_is_what_a_step_saves

.PHONY: demo test test-thorough test-transformers test-gpu bench models lint install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch and what the project needs. The first time takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	touch $(STAMP)

demo: $(STAMP)  ## train a Llama twice, stock and patched, and plot both
	$(BIN)/tigon demo $(ARGS)

test: $(STAMP)  ## everything a machine without a GPU can show
	$(BIN)/python -m pytest tests --ignore tests/gpu -m 'not thorough' --numprocesses 2 $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(BY_KERNELS) -m 'not thorough' --numprocesses 2 $(ARGS)

test-thorough: $(STAMP)  ## more sizes, engines and graphs of the same: three minutes on two cores
	$(BIN)/python -m pytest tests --ignore tests/gpu -m thorough --numprocesses 2 $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(BY_KERNELS) -m thorough --numprocesses 2 $(ARGS)

test-transformers:  ## what meets transformers, in another version: make test-transformers TRANSFORMERS=5.23.0
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -Ev '^(transformers|huggingface_hub|tokenizers|safetensors)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]' \
		'transformers==$(TRANSFORMERS)' --constraint $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pytest tests/hf tests/recognition --numprocesses 2 $(ARGS)

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
	rm -rf $(VENV) .venv-transformers-* build dist src/*.egg-info .pytest_cache .ruff_cache
