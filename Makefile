# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# `make test-transformers` installs this version of transformers into its own venv, by default the newest tested one.
TRANSFORMERS ?= 5.24.0
DEEPSPEED ?= 0.19.8
OTHER_VENV := .venv-transformers-$(TRANSFORMERS)
OTHER_STAMP := $(OTHER_VENV)/.installed

# `make test-lowest` installs the lowest versions that pyproject.toml allows into its own venv. PINS replaces some.
PINS ?=
LOWEST_VENV := .venv-lowest$(if $(PINS),-pinned)
LOWEST_STAMP := $(LOWEST_VENV)/.installed

# These tests run with other versions: all tests that use transformers, or with PART=1 the quick ones of the files that
# show the types, the patch, the guards, and what recognition reads of transformers and PEFT.
PART ?=
PART_TESTS := tests/recognition/test_adapters.py tests/recognition/test_code_changed_after.py \
	tests/recognition/test_experts.py tests/recognition/test_guard.py tests/recognition/test_replacement.py \
	tests/recognition/test_source.py tests/hf/test_patch.py tests/hf/test_by_type.py tests/hf/test_all_types.py
VERSION_TESTS = tests/runtime/test_requirements.py tests/cli/test_cli.py tests/benchmarks/ops/test_plots.py \
	$(if $(PART),$(PART_TESTS) -m 'not thorough',tests/recognition tests/hf)

TYPE_TESTS := tests/hf/test_all_types.py

# The lowest transformers ignores the sizes in the config of this type, so its own small model raises an error.
LEFT_OUT := --deselect \
	'tests/hf/test_all_types.py::test_loss_and_gradients_are_stock_and_restore_is_exact[dbrx]'

# KERNEL_TESTS run the kernels on a GPU or in Triton's interpreter. INTERPRETER_TESTS also have tests that run only in
# the interpreter.
KERNEL_TESTS := tests/ops tests/recognition/test_fused_statements.py \
	tests/recognition/test_fused_statements_changed.py tests/recognition/test_head_norms.py \
	tests/recognition/test_adapters.py tests/hf/test_fp8_maxima.py tests/hf/test_kernels.py tests/hf/test_lora.py \
	tests/hf/test_lora_experts.py
INTERPRETER_TESTS := $(KERNEL_TESTS) tests/memory/test_bytes.py tests/memory/test_lean.py tests/memory/test_lean_hooks.py \
	tests/cli/plan/test_plan.py::test_saved_bytes_are_what_a_step_saves
# One worker for each core, and at most eight: each one needs up to 2 GiB of memory.
WORKERS := --numprocesses logical --maxprocesses 8 --dist worksteal

# There is a worker for each core, so more threads in each would only wait for each other.
test test-thorough test-transformers test-lowest: export OMP_NUM_THREADS = 1
# Images of containers often set this variable. Then each of the 60 processes that the tests start would compile the
# package and the tests again.
export PYTHONDONTWRITEBYTECODE =

TRAINING_CASES := llama-1b llama-8b-lora qwen-4b-lora trl

.PHONY: demo test test-thorough test-deepspeed test-transformers test-lowest other-versions test-gpu bench bench-train models docs lint dist install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch and all other packages of the project. The first time takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	touch $(STAMP)

demo: $(STAMP)  ## train a Llama twice, stock and patched, and plot both
	$(BIN)/python -m benchmarks demo $(ARGS)

test: $(STAMP)  ## run all tests that need no GPU, except the thorough ones
	$(BIN)/python -m pytest tests --ignore tests/gpu -m 'not thorough' $(WORKERS) $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(INTERPRETER_TESTS) -m 'not thorough' $(WORKERS) $(ARGS)

test-thorough: $(STAMP)  ## run the thorough tests: more sizes, chips, models and engines; with PART=1 all model types
	$(BIN)/python -m pytest $(if $(PART),$(TYPE_TESTS),tests --ignore tests/gpu) -m thorough $(WORKERS) $(ARGS)
	$(if $(PART),,TRITON_INTERPRET=1 $(BIN)/python -m pytest $(INTERPRETER_TESTS) -m thorough $(WORKERS) $(ARGS))

# Without `--no-compile`, pip compiles all modules, of which these tests import a part.
$(OTHER_STAMP): pyproject.toml constraints.txt
	test -x $(OTHER_VENV)/bin/python || $(PYTHON) -m venv $(OTHER_VENV)
	grep -Ev '^(transformers|huggingface_hub|tokenizers|safetensors)==' constraints.txt > $(OTHER_VENV)/constraints.txt
	$(OTHER_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]' \
		'transformers==$(TRANSFORMERS)' --constraint $(OTHER_VENV)/constraints.txt
	touch $(OTHER_STAMP)

$(LOWEST_STAMP): pyproject.toml
	test -x $(LOWEST_VENV)/bin/python || $(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python tests/lowest_versions.py $(PINS) > $(LOWEST_VENV)/constraints.txt
	$(LOWEST_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]' \
		--constraint $(LOWEST_VENV)/constraints.txt
	touch $(LOWEST_STAMP)

other-versions: $(OTHER_STAMP) $(LOWEST_STAMP)  ## install what test-transformers and test-lowest need

test-transformers: $(OTHER_STAMP)  ## test another version of transformers: make test-transformers TRANSFORMERS=5.24.0
	$(OTHER_VENV)/bin/python -m pytest $(VERSION_TESTS) $(WORKERS) $(ARGS)

test-lowest: $(LOWEST_STAMP)  ## test the lowest versions, on Python 3.11: make test-lowest PINS='torch==2.13.0 triton==3.7.1'
	$(LOWEST_VENV)/bin/python -m pytest $(VERSION_TESTS) $(WORKERS) $(LEFT_OUT) $(ARGS)

test-deepspeed: $(STAMP)  ## install DeepSpeed and test its ZeRO-3 on two ranks
	$(BIN)/pip install --quiet --disable-pip-version-check 'deepspeed==$(DEEPSPEED)' --constraint constraints.txt
	$(BIN)/python -m pytest tests/runtime/test_engines.py tests/hf/test_two_ranks.py \
		tests/examples/test_engines.py tests/integrations/test_deepspeed.py -m deepspeed $(ARGS)

test-gpu: $(STAMP)  ## run the tests of the ops and those that need a GPU
	$(BIN)/python -m pytest $(KERNEL_TESTS) tests/gpu $(ARGS)

bench: $(STAMP)  ## time every op against its peers; without ARGS, on a GPU also `make bench-train`
	$(BIN)/python -m benchmarks ops $(ARGS)
	if [ -z "$(ARGS)" ] && $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(MAKE) bench-train; fi

bench-train: $(STAMP)  ## train the cases of small batches; each writes its report into a folder of `runs`
	for case in $(TRAINING_CASES); do $(BIN)/python -m benchmarks train --case $$case --out runs/$$case $(ARGS); done

models: $(STAMP)  ## write docs/models.md and tests/hf/parts.json: what is replaced in every model type
	PYTHONPATH=tests $(BIN)/python -m hf.models_page
	PYTHONPATH=tests $(BIN)/python -m hf.parts

docs: $(STAMP)  ## build the site of the documentation into `site/`; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml

dist: $(STAMP)  ## build the sdist and the wheel of the current commit twice, and compare their hashes
	$(BIN)/pip install --quiet --disable-pip-version-check build
	.ci/dist $(BIN)/python

clean:
	rm -rf $(VENV) .venv-transformers-* .venv-lowest* build dist site src/*.egg-info .pytest_cache .ruff_cache
