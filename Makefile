# `make` shows what there is. Everything runs in .venv, which is made when it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# GPU=1: for machines with GPUs, where this one has none. Their torch is that of SGLang's servers.
GPU ?= $(wildcard /dev/nvidia0)
TORCH := $(shell grep '^torch==' $(if $(GPU),constraints-gpu.txt,constraints.txt))
FLASH := $(if $(GPU),$(shell grep '^flash-attn-4==' constraints-gpu.txt))
UV := $(shell grep '^uv==' constraints.txt)
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/megarl

.PHONY: help install quickstart srpo-quickstart connectors-env test lint docs bench gpu-check bench-trl-env older-env triton-test sglang-env smollm2 libero-env metaworld-env

help: ## this list
	@echo 'make TARGET, of these:'
	@sed -nE 's/^([a-z0-9%-]+):[^#]*## (.*)/  \1|\2/p' Makefile | sed 's/%/NAME/' | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'
	@echo 'settings: PYTHON=python3.12, GPU=1 (for GPUs where this machine has none), JOBS=0 (of tests)'

install: $(STAMP) ## the tested versions in .venv; source .venv/bin/activate puts megarl on the path

quickstart: $(STAMP) ## a tiny model learns two-digit addition, in 7 to 9 minutes
	$(BIN)/megarl train recipes/grpo_quickstart.yaml

srpo-quickstart: $(STAMP) ## a tiny robot policy learns to reach
	$(BIN)/megarl train recipes/srpo_reach_quickstart.yaml

# Processes that tests start read what the first one has compiled, whatever the environment says of keeping that.
test campaign-%: export PYTHONDONTWRITEBYTECODE :=

# A file of tests stays in one process. JOBS=0 runs them one after the other, as where all of them share one GPU.
JOBS ?= $(if $(wildcard /dev/nvidia0),0,3)
test: $(STAMP) ## the tests, 10 to 30 minutes on two free cores
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Repetitions, seeds and kill matrices of what the suite shows once; the names are in tests/campaigns.py.
campaign-%: $(STAMP) ## the tests of a campaign; names: CONTRIBUTING.md
	$(BIN)/pytest --campaign=$* --durations=0

# What depends on torch, with another version of it: `make campaign-torch-2.11.0`. 6 GB in the cache folder.
TORCH_SLICE := algorithms data evaluation kernels models rollout sync system training test_pretend_cuda.py
campaign-torch-%:
	test -x $(CACHE)/torch-$*/bin/python || $(PYTHON) -m venv $(CACHE)/torch-$*
	$(CACHE)/torch-$*/bin/python -m pip install --quiet "torch==$*"
	(echo "torch==$*"; grep -v '^torch==' constraints.txt) > $(CACHE)/torch-$*/constraints.txt
	$(CACHE)/torch-$*/bin/python -m pip install --quiet -c $(CACHE)/torch-$*/constraints.txt -e '.[dev]'
	$(CACHE)/torch-$*/bin/pytest -n $(JOBS) --dist loadfile -m "not servers" $(addprefix tests/,$(TORCH_SLICE))

# What depends on Megatron-Core, with its current version on Python 3.12: `make campaign-megatron-0.19.2`. 7 GB in the
# cache folder.
MEGATRON_SLICE := models rollout robots/models sync system/compat training
campaign-megatron-%: $(STAMP)
	$(BIN)/python tools/megatron_env.py $* $(CACHE)/megatron-$* build/megatron-$*
	build/megatron-$*/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not servers" $(addprefix tests/,$(MEGATRON_SLICE))

lint: $(STAMP) ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/package_view.py mypy
	$(BIN)/python tools/package_view.py lint-imports

# The documentation as a site with search, in build/site; a broken link is an error.
docs: $(STAMP) ## the documentation as a site with search, in build/site
	$(BIN)/python -c 'import material' 2> /dev/null || \
	  $(BIN)/python -m pip install --quiet -c constraints.txt mkdocs-material
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(STAMP) ## throughput on two fixed cases
	$(BIN)/megarl bench

# What works on this machine's GPUs, and how fast (docs/gpu.md): ARGS='--only kernels'.
gpu-check: $(STAMP) ## what works on this machine's GPUs, and how fast
	$(BIN)/megarl doctor gpu $(ARGS)

# TRL for the side by side (benchmarks/peers): its requirements are its own, so it gets its own environment.
TRL_ENV ?= $(CACHE)/trl
bench-trl-env: ## the environment of TRL for the side by side
	test -x $(TRL_ENV)/bin/python || $(PYTHON) -m venv $(TRL_ENV)
	$(TRL_ENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(TRL_ENV)/bin/python -m pip install --quiet trl==1.16.0 "$(shell grep '^transformers==' constraints.txt)"

# transformers 4, which must read exports as they are (make campaign-exports): 1.1 GB in the cache folder.
OLDER := transformers==4.57.6
OLDER_ENV ?= $(CACHE)/$(subst ==,-,$(OLDER))
older-env: ## transformers 4, which reads exports: 1.1 GB
	test -x $(OLDER_ENV)/bin/python || $(PYTHON) -m venv $(OLDER_ENV)
	$(OLDER_ENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(OLDER_ENV)/bin/python -m pip install --quiet $(OLDER) jinja2 pillow

# Packages whose requirements are their own (make campaign-connectors): 0.4 GB each in the cache folder.
CONNECTORS := verifiers==0.4.0 openenv-core==0.3.0 openenv==0.10.0
connectors-env: ## interpreters with verifiers and with servers of OpenEnv: 1 GB
	$(foreach package,$(CONNECTORS),test -x $(CACHE)/$(subst ==,-,$(package))/bin/python || \
		$(PYTHON) -m venv $(CACHE)/$(subst ==,-,$(package)); \
		$(CACHE)/$(subst ==,-,$(package))/bin/python -m pip install --quiet $(package);)

# Kernels of a GPU in Triton's interpreter, on a CPU. Triton has 0.7 GB, and comes to the cache folder.
TRITON := triton==3.7.1
TRITON_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/megarl/$(subst ==,-,$(TRITON))
triton-test: $(STAMP) ## kernels of a GPU in Triton's interpreter, 0.7 GB
	test -d $(TRITON_DIR)/triton || $(BIN)/python -m pip install --quiet --no-deps --target $(TRITON_DIR) $(TRITON)
	PYTHONPATH=$(TRITON_DIR) $(BIN)/pytest tests/kernels/test_logits_gpu.py tests/kernels/test_layers_gpu.py \
		tests/kernels/test_experts_gpu.py tests/kernels/test_decode_gpu.py

# The interpreter of SGLang servers, in the cache folder: SGLANG_KIND=cpu (3 GB), cuda (11 GB) or auto.
SGLANG_KIND ?= auto
sglang-env: $(STAMP) ## the interpreter of SGLang servers: 3 GB for CPUs, 11 GB for GPUs
	$(BIN)/python tools/sglang_env.py --kind $(SGLANG_KIND)

# SmolLM2-135M-Instruct, for recipes/grpo_smollm2_words.yaml: 270 MB in ~/.cache/megarl.
smollm2: $(STAMP) ## SmolLM2-135M-Instruct in the cache folder, 270 MB
	$(BIN)/python tools/smollm2.py

# The interpreter of the LIBERO simulator, in the cache folder (docs/embodied.md): 2.3 GB.
libero-env: $(STAMP) ## the interpreter of the LIBERO simulator, 2.3 GB
	$(BIN)/python tools/simulator_env.py libero

# The interpreter of the Meta-World simulator, in the cache folder: 0.4 GB. Debian needs libegl1 and libopengl0.
metaworld-env: $(STAMP) ## the interpreter of the Meta-World simulator, 0.4 GB
	$(BIN)/python tools/simulator_env.py metaworld

# Nothing is compiled while it is installed, which would take as long again. These import what a run needs.
COMPILED := ray, mlflow.store.tracking.sqlalchemy_store, megarl.runtime.worker, megarl.disaggregated.loop, megarl.training.engine
# uv installs in seconds; without it, pip installs (tools/installer.py). torch comes first, by itself: resolved together
# with the rest, another build of several gigabytes may be chosen.
INSTALL := $(BIN)/python tools/installer.py $(BIN)/python
$(STAMP): setup.py pyproject.toml constraints.txt constraints-gpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  "megarl needs Python 3.11 or newer, $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12 ..." % v[:2])'
	@echo 'installing into $(VENV)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(UV)" || echo 'uv could not be installed: pip takes some minutes'
	$(INSTALL) "$(TORCH)"
	(echo "$(TORCH)"; grep -v '^torch==' constraints.txt) > $(VENV)/constraints.txt
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[dev]'
	$(if $(FLASH),$(INSTALL) -c $(VENV)/constraints.txt "$(FLASH)" || echo 'flash-attn-4 could not be installed')
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -W ignore -c 'import $(COMPILED)'
	touch $@
