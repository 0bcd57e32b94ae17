# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Another version of transformers than that of constraints.txt, by default the newest that was tested, in its own venv.
TRANSFORMERS ?= 5.23.0
DEEPSPEED ?= 0.19.8
OTHER := .venv-transformers-$(TRANSFORMERS)

# The lowest versions that pyproject.toml admits, but for those in PINS, in their own venv.
LOWEST := .venv-lowest
PINS ?=

# What runs with other versions: all that meets transformers, or a part of it with PART=1 (three minutes on two cores).
PART ?=
TYPES := afmoe deepseek_v3 falcon gemma2 gemma3_text glm4_moe gpt2 gpt_oss granitemoe llama llama4_text mamba mixtral \
	olmo2 phi3 qwen3 qwen3_next
TRAINED := $(TYPES:%='tests/hf/test_all_types.py::test_loss_and_gradients_are_stock_and_restore_is_exact[%]')
WITH_OTHERS = tests/runtime/test_requirements.py tests/tools/test_cli.py tests/tools/bench/test_plots.py tests/recognition \
	$(if $(PART),tests/hf/test_patch.py tests/hf/test_by_type.py $(TRAINED),tests/hf)

# What runs the kernels: in Triton's interpreter, and those of it that a GPU can run.
ON_KERNELS := tests/ops tests/recognition/test_fused_statements.py
BY_KERNELS := $(ON_KERNELS) tests/memory/test_bytes.py tests/memory/test_lean.py \
	tests/tools/plan/test_plan.py::test_kept_is_what_a_step_saves
WORKERS := --numprocesses 2 --dist worksteal

# Two workers on two cores: more threads in each would only wait for each other.
test test-thorough: export OMP_NUM_THREADS = 1

.PHONY: demo test test-thorough test-deepspeed test-transformers test-lowest test-gpu bench models lint install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch and what the project needs. The first time takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	touch $(STAMP)

demo: $(STAMP)  ## train a Llama twice, stock and patched, and plot both
	$(BIN)/tigon demo $(ARGS)

test: $(STAMP)  ## everything a machine without a GPU can show
	$(BIN)/python -m pytest tests --ignore tests/gpu -m 'not thorough' $(WORKERS) $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(BY_KERNELS) -m 'not thorough' $(WORKERS) $(ARGS)

test-thorough: $(STAMP)  ## more sizes, chips, models, engines and graphs of the same
	$(BIN)/python -m pytest tests --ignore tests/gpu -m thorough $(WORKERS) $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(BY_KERNELS) -m thorough $(WORKERS) $(ARGS)

test-transformers:  ## what meets transformers, with another version: make test-transformers TRANSFORMERS=5.23.0
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -Ev '^(transformers|huggingface_hub|tokenizers|safetensors)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]' \
		'transformers==$(TRANSFORMERS)' --constraint $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pytest $(WITH_OTHERS) --numprocesses 2 $(ARGS)

test-lowest:  ## the same with the lowest versions, on Python 3.11: make test-lowest PINS='torch==2.13.0 triton==3.7.1'
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python tests/lowest_versions.py $(PINS) > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]' \
		--constraint $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pytest $(WITH_OTHERS) --numprocesses 2 $(ARGS)

test-deepspeed: $(STAMP)  ## ZeRO-3 by DeepSpeed on two ranks; DeepSpeed is installed beside the rest
	$(BIN)/pip install --quiet --disable-pip-version-check 'deepspeed==$(DEEPSPEED)' --constraint constraints.txt
	$(BIN)/python -m pytest tests/hf/test_two_ranks.py tests/examples/test_engines.py -m deepspeed $(ARGS)

test-gpu: $(STAMP)  ## the ops and what only a GPU can show
	$(BIN)/python -m pytest $(ON_KERNELS) tests/gpu $(ARGS)

bench: $(STAMP)  ## time every op against its peers
	$(BIN)/tigon bench $(ARGS)

models: $(STAMP)  ## write docs/models.md and tests/hf/parts.json: what is replaced in every model type
	$(BIN)/tigon inspect --all --out docs/models.md
	PYTHONPATH=tests $(BIN)/python -m hf.parts

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-transformers-* $(LOWEST) build dist src/*.egg-info .pytest_cache .ruff_cache
