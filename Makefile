# make demo: everything from nothing. Other targets set themselves up too.
PYTHON ?= python3
# Where torch comes from. On Linux without a GPU, `make setup TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu"`
# saves some GB of CUDA libraries.
TORCH_PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: help setup clients references rivals demo test test-gpu test-duckdb2 check format bench clean
help:
	@echo "make setup     .venv with dflop and everything the demo and the tests need"
	@echo "make demo      train on real media through every part of the system (a few minutes, CPU only)"
	@echo "make test      all tests; the Slurm tests run where Slurm is installed, see tests/slurm/cluster.sh"
	@echo "make test-gpu  tests that need a CUDA device"
	@echo "make test-duckdb2  the store's tests once more, on duckdb 2"
	@echo "make bench     benchmarks of every room (half an hour, 3 GB of disk); BENCH=full for the long ones too"
	@echo "make check     lint and types"
	@echo "make format    format the code"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dflop needs Python 3.11 or newer; set PYTHON=python3.x" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==$(TORCH_VERSION) $(TORCH_PIP_ARGS)
	$(BIN)/pip install -q -c constraints.txt -e '.[flows,train,demo,dev]'
	@touch $@

demo: setup
	$(BIN)/dflop run configs/demo.yaml

test: setup clients references rivals
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# Other versions of duckdb, beside the environment: what people's shells open our snapshots with.
clients: $(VENV)/clients/1.4 $(VENV)/clients/1.5 $(VENV)/clients/2.0

$(VENV)/clients/%: $(VENV)/.ready
	$(BIN)/pip install -q --no-deps --upgrade --target $@ 'duckdb==$*.*'
	@touch $@

# Hugging Face's video processors, which our media rules are held equal to, need torchvision. Beside the environment,
# because its wheel is built for another torch where torch is a CPU build; only tests/models/video_reference.py uses it.
references: $(VENV)/clients/torchvision

$(VENV)/clients/torchvision: $(VENV)/.ready
	$(BIN)/pip install -q --no-deps --upgrade --target $@ torchvision==0.28.0
	@touch $@

# A rival of the scheduler's bench: it cannot share a process with highspy, so it lies beside the environment.
rivals: $(VENV)/clients/ortools

$(VENV)/clients/ortools: $(VENV)/.ready
	$(BIN)/pip install -q --upgrade --target $@ ortools==9.15.6755
	@touch $@

test-duckdb2: setup $(VENV)/clients/2.0
	PYTHONPATH=$(VENV)/clients/2.0 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/store

test-gpu: setup
	$(BIN)/python -m pytest -q tests/gpu

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/sqlfluff lint -q sql

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup rivals
	$(BIN)/python -m tests.bench.store
	$(BIN)/python -m tests.bench.data
	$(BIN)/python -m tests.bench.cost
	$(BIN)/python -m tests.bench.profile
	$(BIN)/python -m tests.bench.simulate
	$(BIN)/python -m tests.bench.engine
	$(BIN)/python -m tests.bench.plan
	$(BIN)/python -m tests.bench.launch
	$(BIN)/python -m tests.bench.regret --part reference
	$(BIN)/python -m tests.bench.schedule
	$(if $(filter full,$(BENCH)),$(BIN)/python -m tests.bench.regret --part regret)
	$(if $(filter full,$(BENCH)),$(BIN)/dflop compare --suite paper)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
