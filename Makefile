# `make` alone explains the targets. Everything is installed into $(VENV); nothing outside the checkout changes
# but pip's cache and the user's cache folder, which holds the demo's model.

PYTHON ?= python3
VENV ?= .venv
# What to give pip for PyTorch. On Linux PyPI's own build brings several GB of CUDA libraries; the CPU build is smaller:
#   make run TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# More arguments for the command behind a target: make run ARGS="--json", make test ARGS="-k nvme"
ARGS ?=
GATE ?=
SECONDS ?= 60
SEED ?= 1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --retries 10 --timeout 180 --disable-pip-version-check --quiet
# An installation is made anew when one of these changes; without a C compiler rows are copied by numpy.
BUILT_FROM := pyproject.toml setup.py kvstore/device/_rows.c
# In variables, because a comma would end an argument of $(call).
FOR_RUN := .[transformers]
FOR_TEST := .[transformers,redis,dev]
# Three tries: a registry may be slow or drop a connection.
retry = for try in 1 2 3; do $(1) && break; [ $$try -lt 3 ] || exit 1; echo "trying again: $(1)"; sleep 5; done

.DEFAULT_GOAL := help
.PHONY: help run test test-vllm sim soak check bench bench-peers proto wheel format clean

help: ## list the targets
	@echo "kvstore: make TARGET [ARGS=...]"
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 12
	@echo "settings: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=\"$(TORCH)\""

run: $(VENV)/.transformers ## install, get a small model, and show a prompt served from memory and from NVMe
	@$(BIN)/kvstore demo $(ARGS)

test: $(VENV)/.dev ## install what the tests need and run all of them
	@$(BIN)/python -m pytest $(ARGS)

test-vllm: $(VENV)/.dev ## build an environment with vLLM (2.5 GB, minutes, once) and run its tests
	@$(BIN)/python -m kvstore_transformers.fetch
	@python=$$($(BIN)/python -m kvstore_vllm.environment) && VLLM_TEST_PYTHON=$$python $(BIN)/python -m pytest tests/vllm $(ARGS)

sim: $(VENV)/.dev ## simulate the core with fresh seeds: make sim SECONDS=60 SEED=1
	@$(BIN)/python -m tests.sim --seconds $(SECONDS) --seed $(SEED) --quiet

soak: SECONDS = 240
soak: $(VENV)/.dev ## kills, stops, bursts, simulator and load for long (35 minutes): make soak SECONDS=240
	@$(BIN)/python -m tests.soak --seconds $(SECONDS) $(ARGS)

check: $(VENV)/.dev ## ruff, mypy --strict, the rules of the code base, and generated code up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_tidy.py
	$(BIN)/python proto/generate.py --check

bench: $(VENV)/.dev ## measure (bench/README.md); GATE=1 fails by bars that aren't met; ARGS="--only lookup"
	@$(BIN)/python -m bench $(if $(GATE),--gate) $(ARGS)

bench-peers: $(VENV)/.dev ## measure LMCache and Mooncake beside it; builds environments for them (2 GB, minutes, once)
	@$(BIN)/python -m bench.peer_lmcache --build $(ARGS)
	@$(BIN)/python -m bench.peer_mooncake --build $(ARGS)

proto: $(VENV)/.dev ## generate the protobuf code again
	$(BIN)/python proto/generate.py

wheel: $(VENV)/.dev ## build the wheel into dist/
	$(BIN)/python -m build --wheel $(ARGS)

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment, builds and caches of this checkout
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f kvstore/device/*.so

# ------------------------------------------------------------------ installed once, until what it is built from changes

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) isn't here: install Python 3.11 or newer, or say make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: say make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) can't make a virtual environment: install its venv package (Debian: python3-venv)"; rm -rf $(VENV); exit 1; }

# One transaction each: torch first, so that its index can be chosen; it stays as it is afterwards.
$(VENV)/.transformers: $(BUILT_FROM) | $(BIN)/python
	@echo "installing PyTorch ($(TORCH)) and kvstore into $(VENV): a few minutes the first time"
	@$(BIN)/python -c 'import torch' 2>/dev/null || { $(call retry,$(PIP) $(TORCH)); }
	@$(call retry,$(PIP) -e '$(FOR_RUN)')
	@touch $@

$(VENV)/.dev: $(BUILT_FROM) $(VENV)/.transformers | $(BIN)/python
	@echo "installing what the tests need into $(VENV)"
	@$(call retry,$(PIP) -e '$(FOR_TEST)')
	@$(BIN)/python -m tests.redis_binaries >/dev/null
	@touch $@
