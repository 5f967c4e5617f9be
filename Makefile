# Every target with a '##' comment is listed by `make`.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

VENV := .venv
GEN := .venv-gen
COMPOSE := .venv-compose
DYNOSIM := .venv-dynosim
PEERS := .venv-peers
LOADER_PEERS := .venv-loader-peers
VLLM := .venv-vllm
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
# Two quiet flags: the closing word is pip's errors, not its progress.
PIP_FLAGS := --quiet --quiet --disable-pip-version-check --no-input
ARGS ?=
# Test processes side by side: of tests that compute more than the cores is slower; those that start
# servers mostly wait for them.
TEST_PROCESSES ?= 2
TEST_PROCESSES_WAITING ?= 3

.PHONY: help setup up test test-unit check format lint types contracts proto-lint fresh tidy \
	generate bench lock clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' \
		| awk -F '\t' '{ printf "  %-12s %s\n", $$1, $$2 }'

# ---------------------------------------------------------------- environment

setup: $(VENV)/stamp ## Create .venv with every pinned dependency and the project itself.

$(VENV)/stamp: requirements.lock pyproject.toml
	@python="$$(tools/find-python.sh)"; \
	test -x $(PY) || "$$python" -m venv $(VENV)
	@if ! cmp -s requirements.lock $(VENV)/requirements.lock; then \
		echo "setup: installing the pinned dependencies (about a minute or two)"; \
		$(BIN)/pip install $(PIP_FLAGS) --require-hashes -r requirements.lock; \
		cp requirements.lock $(VENV)/requirements.lock; \
	fi
	@$(BIN)/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@
	@echo "setup: ready, try '$(BIN)/readyplane --help'"

$(GEN)/stamp: requirements-gen.lock
	@python="$$(tools/find-python.sh)"; \
	test -x $(GEN)/bin/python || "$$python" -m venv $(GEN)
	@$(GEN)/bin/pip install $(PIP_FLAGS) --require-hashes -r requirements-gen.lock
	@touch $@

# What checks docker-compose.yml. Without it the check goes on, and says what it skips.
$(COMPOSE)/stamp: tools/requirements-compose.lock tools/compose.sh
	@python="$$(tools/find-python.sh)"; \
	if tools/compose.sh "$$python"; then touch $@; \
	else echo "setup: no Docker Compose could be had; docker-compose.yml is checked without it" >&2; fi

# ------------------------------------------------------------------------ use

up: setup ## Start the whole system on this machine (ARGS="..." are passed on).
	$(BIN)/readyplane up $(ARGS)

bench: setup ## Run the benchmarks (ARGS="..." are passed on).
	$(PY) -m bench.main $(ARGS)

.PHONY: bench-gate
bench-gate: setup ## Starts with and without planted faults: how often the ready gate errs (ARGS="--starts 24" is quick).
	$(PY) -m bench.gate $(ARGS)

.PHONY: bench-startup
bench-startup: setup ## T_ready by segment, by what a start finds: modelled engines and vLLM (ARGS="--quick").
	$(PY) -m bench.startup $(ARGS)

.PHONY: bench-pairing
bench-pairing: setup ## Our choice of pairs beside six others, in the simulator (ARGS="--seeds 1" is quick).
	$(PY) -m bench.pairing $(ARGS)

.PHONY: bench-decide
bench-decide: setup ## How long one choice of a pair takes, by the size of the fleet (ARGS).
	$(PY) -m bench.decide $(ARGS)

.PHONY: bench-transfer
bench-transfer: setup ## Weights from agent to agent: against a plain stream, fanning out, beside serving (ARGS).
	$(PY) -m bench.transfer $(ARGS)

.PHONY: bench-registry
bench-registry: setup ## The registry with 10,000 manifests, and killed while it is written to (ARGS="--kills 1000").
	$(PY) -m bench.registry $(ARGS)

# ---------------------------------------------------------------------- tests

# The quick layers first, then the ones that start real processes.
test: setup ## Run every test: unit, contract, simulation, tidy, then integration.
	@tools/run-tests.sh $(TEST_PROCESSES) $(TEST_PROCESSES_WAITING) $(ARGS)

test-unit: setup ## Run the tests of the pure brains only.
	$(BIN)/pytest tests/unit $(ARGS)

.PHONY: soak
soak: setup ## Ten minutes of traffic while processes are killed and stopped (ARGS="--seconds 120").
	$(PY) -m readyplane_lab.up.soak $(ARGS)

# --------------------------------------------------------------------- checks

check: setup $(GEN)/stamp $(COMPOSE)/stamp ## Run every static check: format, lint, types, contracts, protos, tidy.
	@$(MAKE) --no-print-directory --keep-going format-check lint types contracts proto-lint tidy
	@echo "check: all passed"

format: setup ## Rewrite the Python files in the project's format.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --quiet .

.PHONY: format-check
format-check:
	$(BIN)/ruff format --check .

lint:
	$(BIN)/ruff check .

types:
	$(BIN)/mypy $(wildcard readyplane services lab tests bench)

contracts:
	$(BIN)/lint-imports

proto-lint:
	@if [ -d proto/readyplane ]; then $(BIN)/buf lint && echo "buf lint: passed"; fi

# The lock against pyproject, fresh generated code, pure modules, clocks, names, sizes, texts.
tidy: $(GEN)/stamp $(COMPOSE)/stamp
	$(BIN)/pytest -q tests/tidy

# ----------------------------------------------------------------- generating

generate: $(GEN)/stamp ## Generate readyplane/v1 from proto/.
	@tools/generate.sh

lock: ## Renew the lock files (needs uv on PATH).
	@tools/lock.sh

clean: ## Remove the environments, the caches and what was built.
	rm -rf $(VENV) $(GEN) $(COMPOSE) $(DYNOSIM) $(PEERS) $(LOADER_PEERS) $(VLLM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------- validity

# Dynamo's simulator, to compare with. Its wheel is for Linux on x86-64; without it the bench goes on.
$(DYNOSIM)/stamp: tools/requirements-dynosim.lock
	@python="$$(tools/find-python.sh)"; \
	test -x $(DYNOSIM)/bin/python || "$$python" -m venv $(DYNOSIM)
	@if $(DYNOSIM)/bin/pip install $(PIP_FLAGS) --no-deps --require-hashes -r $<; then touch $@; \
	else echo "setup: Dynamo's simulator could not be had; its comparison is left out" >&2; fi

.PHONY: bench-validity
bench-validity: setup $(DYNOSIM)/stamp ## How true the simulator is, against formulas, processes, Dynamo, measurements (ARGS).
	$(PY) -m bench.validity $(ARGS)

.PHONY: bench-dynosim
bench-dynosim: setup $(DYNOSIM)/stamp ## Our planner in Dynamo's simulator, beside fleets that do not change (ARGS).
	$(PY) -m bench.dynosim_planner $(ARGS)

# ---------------------------------------------------------------------- router

# What the router is compared with. Without it the benches say "not run".
$(PEERS)/stamp: tools/requirements-peers.lock
	@python="$$(tools/find-python.sh)"; \
	test -x $(PEERS)/bin/python || "$$python" -m venv $(PEERS)
	@if $(PEERS)/bin/pip install $(PIP_FLAGS) --no-deps --require-hashes -r $<; then touch $@; \
	else echo "setup: the peers could not be had; the comparison with them is left out" >&2; fi

.PHONY: bench-kv
bench-kv: setup $(PEERS)/stamp ## The KV index beside Dynamo's RadixTree, fed with the same events (ARGS).
	$(PY) -m bench.kv_index $(ARGS)

.PHONY: bench-router
bench-router: setup $(PEERS)/stamp ## The router beside its peers: what picking a pair costs (ARGS).
	$(PY) -m bench.router $(ARGS)

.PHONY: bench-gateway
bench-gateway: setup $(PEERS)/stamp ## What the gateway adds to a request, beside vllm-router (ARGS).
	$(PY) -m bench.gateway $(ARGS)

# ---------------------------------------------------------------------- loader

# Other loaders, and the PyTorch they need (without a CPU build at hand, a download of some GB).
$(LOADER_PEERS)/stamp: tools/requirements-loader-peers.txt
	@python="$$(tools/find-python.sh)"; \
	test -x $(LOADER_PEERS)/bin/python || "$$python" -m venv $(LOADER_PEERS)
	@if $(LOADER_PEERS)/bin/pip install $(PIP_FLAGS) -r $<; then touch $@; \
	else echo "setup: the other loaders could not be had; the comparison with them is left out" >&2; fi

.PHONY: bench-loader
bench-loader: setup $(LOADER_PEERS)/stamp ## The agent's loader beside raw reads and other loaders, on 2.2 GB (ARGS="--shards 2").
	$(PY) -m bench.loader $(ARGS)

.PHONY: test-gpu
test-gpu: setup ## The loader's host-to-device stage, where there are a GPU and PyTorch; says so elsewhere.
	@$(PY) -m tests.gpu.host_to_device $(ARGS)

# ------------------------------------------------------------------------ vllm

.PHONY: vllm-env
vllm-env: $(VLLM)/stamp ## Make .venv-vllm, a real vLLM on a CPU with the project in it (3.4 GB; docs/vllm.md).

$(VLLM)/stamp: tools/requirements-vllm.txt tools/vllm-env.sh pyproject.toml
	@tools/vllm-env.sh $(VLLM)
	@touch $@

.PHONY: test-vllm
test-vllm: setup ## The engine port and the whole system on a real vLLM, some 15 minutes (ARGS="-k port").
	@tools/test-vllm.sh $(ARGS)
