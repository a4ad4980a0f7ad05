# Every target makes .venv on first use and installs only what it needs. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Not quiet: a slow download is visible.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# matplotlib's cache of fonts: in .venv, so that no home is needed.
export MPLCONFIGDIR ?= $(CURDIR)/$(VENV)/matplotlib
# Tests to run: folders, files or file::test each. By default `make test` runs those of every folder
# that are not marked as slow; what TESTS names it runs in full.
TESTS ?=
FOLDERS := $(addprefix tests/,unit contract simulation endings netlab rdma gpu)
# Those that measure, as all in network namespaces do, have the machine to themselves.
ALONE = $(filter tests/endings% tests/netlab% tests/rdma% tests/gpu%,$(or $(TESTS),$(FOLDERS)))
SHARED = $(filter-out $(ALONE),$(or $(TESTS),$(FOLDERS)))

# pyverbs is compiled for the distribution's own Python, so the tests on ibverbs run under that one.
RDMA_PYTHON ?= /usr/bin/python3
RDMA_VENV := $(VENV)/rdma
RDMA_BIN := $(RDMA_VENV)/bin

.PHONY: help demo test test-slow test-all test-rdma fresh lint bench bench-degraded bench-rdma bench-gpu bench-scale simulate campaign chaos pictures clean
.DEFAULT_GOAL := help
# Tests and benches measure.
.NOTPARALLEL:

# Runs a command where it may make network namespaces: as it is for root, in a user namespace for
# others. Where neither is allowed the tests that need it skip, saying why.
ENTER = $(shell $(BIN)/r2ccl netlab --enter -- true >/dev/null 2>&1 && echo $(BIN)/r2ccl netlab --enter --)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo ## train a small model over four rails a node and lose one on the way
	@$(BIN)/python examples/train_digits.py

test: $(VENV)/.test ## run the tests but the slow ones, in 6 minutes; TESTS="tests/unit/algos ..." runs those
	@$(call pytest,$(if $(TESTS),,-m "not slow"))

test-slow: $(VENV)/.test ## run the tests that `make test` leaves out
	@$(call pytest,-m slow)

test-all: test test-slow ## run every test, the slow ones last

# Runs $(SHARED) on all cores, then $(ALONE) one by one, with the options given.
define pytest
TMPDIR=$$(mktemp -d) && export TMPDIR && trap 'rm -rf "$$TMPDIR"' EXIT || exit; status=0; \
	$(if $(SHARED),$(BIN)/python -m pytest $(1) -n logical --maxprocesses 8 $(SHARED) || status=$$?;) \
	$(if $(ALONE),$(ENTER) $(BIN)/python -m pytest $(1) $(ALONE) || status=$$?;) \
	[ $$status -eq 0 ] && echo "make $@: all passed" || echo "make $@: FAILED, see above"; \
	exit $$status
endef

fresh: ## try the commands of the README on bare machines of 15 kinds; FRESH="user ..." tries those
	@$(PYTHON) tests/fresh/matrix.py $(FRESH)

# Verdicts need a third node. -s: pytest's capture shortens a file it has unlinked, and the machine's file system (9p) cannot.
# Not $(MAKE), which `make -n` would run together with all else on its line.
test-rdma: ## run the tests on real ibverbs: Soft-RoCE in a virtual machine; reports in out/rdma*.xml
	@if ! $(RDMA_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "test-rdma: skipped: $(RDMA_PYTHON), which pyverbs is made for, is no Python 3.11"; \
		exit 0; \
	fi; \
	make --no-print-directory $(RDMA_VENV)/.test || exit; \
	$(RDMA_BIN)/r2ccl rdmalab --prepare; status=$$?; \
	if [ $$status -eq 69 ]; then echo "test-rdma: skipped: for the reason above"; exit 0; fi; \
	[ $$status -eq 0 ] && mkdir -p out || exit $$status; \
	$(RDMA_BIN)/r2ccl rdmalab --nodes 2 --nics 3 --timeout 1800 -- \
		$(RDMA_BIN)/python -m pytest -s tests/rdma --ignore tests/rdma/test_verdicts.py \
		--junitxml=out/rdma.xml && \
	$(RDMA_BIN)/r2ccl rdmalab --nodes 3 --nics 2 --timeout 1800 -- \
		$(RDMA_BIN)/python -m pytest -s tests/rdma/test_verdicts.py --junitxml=out/rdma3.xml

lint: $(VENV)/.lint ## style, types and layers
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --diff . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache
	@echo "lint: style, types and layers hold"

bench: $(VENV)/.bench ## measure against gloo and MPICH, and what resilience costs; results in out/
	@mkdir -p out
	@$(BIN)/python bench/peers.py --json out/peers.json
	@$(BIN)/python bench/overhead.py --json out/overhead.json
	@$(BIN)/python bench/failover.py --json out/failover.json --png out/failover.png

# As test-rdma. The native part is measured outside: the machine's processor is emulated.
bench-degraded: $(VENV)/.demo ## measure what lost NICs cost, and the planner; 40 minutes; results in out/
	@mkdir -p out; for what in cloudlab straggler planner; do \
		$(BIN)/python bench/degraded.py --what $$what --json out/degraded-$$what.json || exit; \
	done

bench-rdma: ## measure RDMA against perftest, in a virtual machine; results in out/verbs.json
	@if ! $(RDMA_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "bench-rdma: skipped: $(RDMA_PYTHON), which pyverbs is made for, is no Python 3.11"; \
		exit 0; \
	fi; \
	make --no-print-directory $(RDMA_VENV)/.test || exit; \
	mkdir -p out; \
	$(RDMA_BIN)/python bench/verbs_perf.py --native --json out/verbs_native.json || exit; \
	$(RDMA_BIN)/r2ccl rdmalab --prepare; status=$$?; \
	if [ $$status -eq 69 ]; then echo "bench-rdma: skipped: for the reason above"; exit 0; fi; \
	[ $$status -eq 0 ] || exit $$status; \
	$(RDMA_BIN)/r2ccl rdmalab --nodes 2 --nics 3 --timeout 1800 -- \
		$(RDMA_BIN)/python bench/verbs_perf.py --json out/verbs.json

# CuPy and the compiler are large: not fetched where there is no driver to run them.
bench-gpu: ## verify and measure all that needs a GPU, in 9 minutes; results in out/gpu.json
	@if ! $(PYTHON) -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then \
		echo "bench-gpu: skipped: there is no NVIDIA driver here (libcuda.so.1)"; \
		exit 0; \
	fi; \
	make --no-print-directory $(VENV)/.gpu || exit; \
	mkdir -p out; \
	$(BIN)/python bench/gpu.py --json out/gpu.json; status=$$?; \
	if [ $$status -eq 69 ]; then echo "bench-gpu: skipped: for the reason above"; exit 0; fi; \
	exit $$status

bench-scale: $(VENV)/.demo ## measure what each rank costs as ranks are added; results in out/
	@mkdir -p out
	@$(BIN)/python bench/scale.py --json out/scale.json --png out/scale.png

simulate: $(VENV)/.test ## 20,000 random fault plans in the simulator
	@R2CC_SIM_EXAMPLES=20000 $(BIN)/python -m pytest tests/simulation --timeout 7200

campaign: $(VENV)/.test ## 50 runs of every fault on real sockets in network namespaces
	@R2CC_CAMPAIGN_RUNS=50 $(BIN)/python -m pytest tests/netlab --timeout 3600 -rA

chaos: $(VENV)/.test ## random jobs under random faults on random netlabs; SECONDS=600 SEED=1
	@$(BIN)/python bench/chaos.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1); status=$$?; \
	if [ $$status -eq 69 ]; then echo "chaos: skipped: for the reason above"; exit 0; fi; \
	exit $$status

pictures: $(VENV)/.core ## draw the schedules and the packages anew: docs/pictures/
	@$(BIN)/python docs/pictures/draw.py && $(BIN)/python docs/pictures/packages.py

clean: ## remove what make made
	rm -rf $(VENV) out build *.egg-info

# Stamps: one a set of packages, made anew when pyproject.toml changes.
$(VENV)/.core: pyproject.toml
	@echo "installing r2ccl into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "r2ccl needs Python 3.11 or newer, which '$(PYTHON)' is not;" \
			"another one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "r2ccl needs Python's venv module: apt-get install python3-venv"; exit 1; }
	@$(PIP) install "pip>=25.1"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	@echo "installing what the demo needs ..."
	@$(PIP) install --editable ".[demo]"
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "installing what the tests need ..."
	@$(PIP) install --group test
	@touch $@

$(RDMA_VENV)/.test: $(VENV)/.core
	@echo "installing what the tests on ibverbs need into $(RDMA_VENV) ..."
	@test -x $(RDMA_BIN)/python || $(RDMA_PYTHON) -m venv --without-pip $(RDMA_VENV)
	@$(PIP) --python $(RDMA_BIN)/python install --editable . --group test --group rdmalab
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	@echo "installing what the checks need ..."
	@$(PIP) install --group lint
	@touch $@

# torch is not among it: which build of it fits depends on the driver.
$(VENV)/.gpu: $(VENV)/.test
	@echo "installing CuPy and the compiler of the kernels ..."
	@$(PIP) install --editable ".[gpu]"
	@touch $@

$(VENV)/.bench: $(VENV)/.demo
	@echo "installing the peers to measure against ..."
	@$(PIP) install --group bench
	@touch $@
