# `make setup`, `make check` and `make test` are all one must know.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n auto

.PHONY: help setup quickstart smollm2 check format test test-slow test-gpu bench docs clean

help:
	@echo "setup       virtual environment in $(VENV) with megatrain and the tested versions of everything"
	@echo "quickstart  fine-tune the embedded model on the embedded data (about a minute on two cores)"
	@echo "smollm2     fetch SmolLM2-135M-Instruct and fine-tune it on chats"
	@echo "check       ruff, mypy --strict, import-linter, every shipped recipe, docs up to date"
	@echo "test        the default tests     test-slow  all that need no GPU     test-gpu  on a CUDA machine"
	@echo "bench       measure this machine  docs       regenerate the generated documents"

$(BIN)/megatrain: pyproject.toml constraints.txt setup.py $(wildcard src/megatrain/optim/kernel/*.cpp src/megatrain/optim/kernel/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

setup: $(BIN)/megatrain

quickstart: setup
	$(BIN)/megatrain finetune quickstart --set output.overwrite=true
	$(BIN)/python scripts/sample.py runs/quickstart

smollm2: setup
	test -d models/smollm2-135m-instruct || $(BIN)/python scripts/fetch_smollm2.py models/smollm2-135m-instruct
	$(BIN)/megatrain finetune smollm2-135m --set model.path=models/smollm2-135m-instruct

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/megatrain recipe check $(wildcard recipes/*.yaml)
	$(BIN)/python scripts/recipe_doc.py --check
	$(BIN)/python scripts/memory_doc.py --check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup
	$(RUN)

test-slow: setup
	$(RUN) -m "not gpu"

test-gpu: setup
	$(RUN) -n 0 -m gpu tests/gpu tests/families/test_varlen_gpu.py tests/optim/test_on_device_gpu.py

bench: setup
	$(BIN)/megatrain bench quickstart

docs: setup
	$(BIN)/python scripts/recipe_doc.py
	$(BIN)/python scripts/memory_doc.py
	$(BIN)/python scripts/models_doc.py

clean:
	rm -rf build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
