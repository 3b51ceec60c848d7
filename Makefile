# make demo: everything from nothing. Other targets set themselves up too.
PYTHON ?= python3
# Where torch comes from. Its wheels for Linux bring some GB of CUDA libraries, so without an NVIDIA driver the CPU build is taken, unless
# pip was given an index, as behind a mirror. Other arguments decide otherwise: `make setup TORCH_PIP_ARGS="--index-url ..."`.
TORCH_PIP_ARGS ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
# Scripts of a virtual environment name its folder: in a checkout that moved it is recreated.
MADE_IN := $(shell cat $(VENV)/.ready 2>/dev/null)
IS_ELSEWHERE := $(shell [ -z "$(MADE_IN)" ] || [ "$(MADE_IN)" = "$(CURDIR)" ] || echo yes)

LANES := layouts jobs kills instances served browser people slurm

.PHONY: help setup clients references demo test test-all coverage test-gpu test-duckdb2 test-oldest mutants check format bench chaos fuzz docs clean $(LANES:%=lane-%)
help:
	@echo "make setup     .venv with dflop and everything the demo and the tests need"
	@echo "make demo      train on real media through every part of the system (a few minutes, CPU only)"
	@echo "make check     lint, import rules and types"
	@echo "make test      the tests to run before a push (minutes, two cores)"
	@echo "make lane-NAME the tests to run before a change of a package lands: $(LANES)"
	@echo "make test-duckdb2  the store's tests once more, on duckdb 2"
	@echo "make test-oldest   the engine's tests once more, on the oldest torch and transformers"
	@echo "make test-all  all of these, and the mutants (hours)"
	@echo "make coverage  make test once more, and the lines of dflop/ that it runs"
	@echo "make mutants   48 faults put into the code: which of them do tests catch?"
	@echo "make test-gpu  tests that need a CUDA device"
	@echo "make bench     the shorter benchmarks (20 minutes by the sum of its parts, 3 GB of disk); BENCH=full for all of them, whole (hours);"
	@echo "               SIZES=TABLE MEDIA=FOLDER for real sample sizes and media"
	@echo "make chaos     random faults in whole runs of the demo (two hours; MINUTES= RUNS= SEED= CHAOS=--slurm)"
	@echo "make fuzz      hostile input for MINUTES=10 minutes; TARGET=name for one kind of it, SEED=1"
	@echo "make docs      the documentation site, offline: .site/html/index.html"
	@echo "make format    format the code"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt $(if $(IS_ELSEWHERE),moved)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dflop needs Python 3.11 or newer; set PYTHON=python3.x" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_PIP_ARGS)$$PIP_INDEX_URL" ] || [ "$$(uname -s)" != Linux ] || [ -e /proc/driver/nvidia ] \
	    || command -v nvidia-smi || $(BIN)/pip config get global.index-url 2>/dev/null; then \
	  $(BIN)/pip install -q torch==$(TORCH_VERSION) $(TORCH_PIP_ARGS); \
	else \
	  echo "no NVIDIA driver: torch's CPU build from $(CPU_INDEX)"; \
	  $(BIN)/pip install -q --retries 0 --timeout 15 torch==$(TORCH_VERSION) --index-url $(CPU_INDEX) \
	    || { echo "it cannot be had there: torch from pip's usual index"; $(BIN)/pip install -q torch==$(TORCH_VERSION); }; \
	fi 2>&1
	$(BIN)/pip install -q -c constraints.txt -e '.[flows,train,demo,dev]'
	$(BIN)/python -m tests.warm
	@echo "$(CURDIR)" > $@

.PHONY: moved
moved:
	@echo "$(VENV) was made in $(MADE_IN): recreating it"
	rm -rf $(VENV)

demo: setup
	$(BIN)/dflop run configs/demo.yaml

test: setup clients references
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# Slurm's tests share one cluster, and those of a server its port: one after the other.
WORKERS := 2
lane-served lane-slurm: WORKERS := 0
$(LANES:%=lane-%): lane-%: setup clients references
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --lane=$*

test-all: test $(LANES:%=lane-%) test-duckdb2 test-oldest mutants

# Other versions of duckdb, outside the environment: what people's shells open our snapshots with.
clients: $(VENV)/clients/1.4 $(VENV)/clients/1.5 $(VENV)/clients/2.0

$(VENV)/clients/%: $(VENV)/.ready
	$(BIN)/pip install -q --no-deps --upgrade --target $@ 'duckdb==$*.*'
	@touch $@

# Hugging Face's video processors, which our media rules are held equal to, need torchvision. Outside the environment,
# because its wheel is built for another torch where torch is a CPU build; only tests/models/video_reference.py uses it.
references: $(VENV)/clients/torchvision $(VENV)/clients/datasets $(VENV)/clients/peft $(VENV)/clients/trl

$(VENV)/clients/torchvision: $(VENV)/.ready
	$(BIN)/pip install -q --no-deps --upgrade --target $@ torchvision==0.28.0
	@touch $@

# What a folder's splits are compared with.
$(VENV)/clients/datasets: $(VENV)/.ready
	$(BIN)/pip install -q --no-deps --upgrade --target $@ datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1
	@touch $@

# What adapters are compared with.
$(VENV)/clients/peft: $(VENV)/.ready
	$(BIN)/pip install -q --no-deps --upgrade --target $@ peft==0.21.2
	@touch $@

# Whose trainer packs exactly; it wants datasets, too.
$(VENV)/clients/trl: $(VENV)/clients/datasets
	$(BIN)/pip install -q --no-deps --upgrade --target $@ trl==1.16.0
	@touch $@

# The site's builder. Outside the environment, so that nothing of it is a dependency.
docs: $(VENV)/clients/zensical
	PYTHONPATH=$(VENV)/clients/zensical $(BIN)/python -m docs.site

$(VENV)/clients/zensical: $(VENV)/.ready
	$(BIN)/pip install -q --upgrade --target $@ zensical==0.0.60
	@touch $@

test-duckdb2: setup $(VENV)/clients/2.0
	PYTHONPATH=$(VENV)/clients/2.0 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/store

# The oldest torch and transformers that pyproject.toml allows, outside the environment (5 GB of disk, with CUDA's libraries).
$(VENV)/clients/oldest: $(VENV)/.ready
	$(BIN)/pip install -q --upgrade --target $@ torch==2.11.0 'transformers==5.17.*'
	@touch $@

test-oldest: setup $(VENV)/clients/oldest
	PYTHONPATH=$(VENV)/clients/oldest $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/parallel tests/train tests/gpu

fuzz: MINUTES ?= 10
fuzz: SEED ?= 1
fuzz: TARGET ?=
fuzz: setup
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(addprefix --target ,$(TARGET))

# Lines of dflop/ that tests run, those of jobs, ranks and workers too; fails below the bound in pyproject.toml.
coverage: setup clients references
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -p no:tests.budget -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

mutants: setup
	$(BIN)/python -m tests.mutants

test-gpu: setup
	$(BIN)/python -m pytest -q tests/gpu

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/sqlfluff lint -q sql

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m tests.bench $(if $(filter full,$(BENCH)),--full) $(if $(SIZES),--sizes $(SIZES)) $(if $(MEDIA),--media $(MEDIA))

# Faults are drawn from SEED; `CHAOS="--run 7"` plays run 7 of it again. CHAOS=--slurm: on the tests' Slurm, with its faults.
chaos: MINUTES ?= 120
chaos: RUNS ?= 50
chaos: SEED ?= 0
chaos: CHAOS ?=
chaos: setup
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --runs $(RUNS) --seed $(SEED) $(CHAOS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
