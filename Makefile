# make demo      write text with the demo model in the emulator (sets up .venv first; needs Python 3.11+, g++, make)
# make test      the tests that need no GPU: every property, in five to nine minutes on two cores
# make test-all  those, and the same properties over many more points (marked `exhaustive`); before a release
# make check     lint, types, and kernels_generated/ as the generator writes it today
# make kernels   write kernels_generated/ again
# make gpu-test  the tests that need an NVIDIA GPU of compute capability 9.0
# make clean     remove what the targets above made

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev

PROMPT ?= One morning,
KERNELS ?= kernels_generated
# Processes of gpu-test: what it waits for are compilers, not the GPU that they share.
GPU_WORKERS ?= 12
# MODEL:BATCH of each kernel of steps in kernels_generated/, MODEL:pass-TOKENS of each that reads prompts.
KERNEL_CONFIGS := demo:1 demo:8 llama-3.2-1b:1 llama-3.2-1b:8 llama-3.1-8b:1 llama-3.1-8b:2 llama-3.1-8b:4 \
	llama-3.1-8b:8 llama-3.1-70b:1 qwen3-0.6b:1 qwen3-8b:1 \
	llama-3.1-8b@fp8:1 llama-3.1-8b@int4-g128:1 llama-3.1-8b@int4-g128:8 llama-3.1-70b@int4-g128:1 \
	llama-3.1-8b:pass-256 llama-3.1-8b:pass-512 llama-3.1-8b:pass-2048 llama-3.1-8b@int4-g128:pass-2048

# The first of these that starts and is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

.PHONY: demo test test-all check lint types kernels kernels-current gpu-test clean compiler

demo: $(RUN_READY) compiler
	$(BIN)/cheetah run demo "$(PROMPT)" --device emulator --max-tokens 256

test: $(DEV_READY) compiler
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu and not exhaustive"

test-all: $(DEV_READY) compiler
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu"

gpu-test: $(DEV_READY)
	$(BIN)/python -m pytest -n $(GPU_WORKERS) --dist loadgroup -m "gpu and not exhaustive"

check: $(DEV_READY)
	@$(MAKE) --no-print-directory -j3 -O lint types kernels-current

lint: $(DEV_READY)
	$(BIN)/ruff check .

types: $(DEV_READY)
	$(BIN)/mypy

kernels: $(RUN_READY)
	@mkdir -p "$(KERNELS)"
	$(BIN)/python -m cheetah.tools.regenerate "$(KERNELS)" $(KERNEL_CONFIGS)

kernels-current: $(RUN_READY)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(MAKE) --no-print-directory kernels KERNELS="$$fresh" >/dev/null && \
	if diff -r -x README.md kernels_generated "$$fresh"; then echo "kernels_generated/ is up to date"; \
	else echo "kernels_generated/ (<) is not what the generator writes (>): run 'make kernels' and commit"; exit 1; fi

# Set up once; again when pyproject.toml changes.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found: install it, or name it: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than Python 3.11, or does not start: name a newer one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) could not make a virtual environment: install its venv module (Debian: apt install python3-venv)"; exit 1; }

$(RUN_READY): pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable .
	@touch $@

$(DEV_READY): pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@ $(RUN_READY)

compiler:
	@command -v g++ >/dev/null || { echo "g++ is needed by the emulator and was not found (Debian: apt install g++)"; exit 1; }

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
