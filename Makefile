# Every target makes .venv on first use and installs only what it needs. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip is not quiet, so that a slow download is visible.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# The font cache of matplotlib is in .venv, so that no home directory is needed.
export MPLCONFIGDIR ?= $(CURDIR)/$(VENV)/matplotlib
# So is what torch compiles, which it would leave in /tmp.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/$(VENV)/torchinductor
# The tests start hundreds of processes. Some images set this; each process would compile all of r2ccl.
unexport PYTHONDONTWRITEBYTECODE
# In each process that imports NumPy, OpenBLAS starts a thread per core, which takes 0.1 s of CPU time.
test test-slow test-all test-torch test-interop test-matrix: export OPENBLAS_NUM_THREADS ?= 1
# Tests to run: a list of folders, files or file::test. By default, `make test` runs the tests of all
# folders that are not marked as slow. Tests named in TESTS run even if they are marked as slow.
TESTS ?=
# K/N runs the K-th of N slices of the tests, K from 0. By default, all run.
SLICE ?=
# Versions of Python for `make test-matrix`.
MATRIX ?= 3.11 3.12 3.13 3.14
FOLDERS := $(addprefix tests/,unit contract simulation bench endings netlab rdma gpu)
# Tests of NICs and GPUs share the hardware, so they run one after another. Endings and network namespaces
# wait most of the time, but the tests of a file may share what they need, so whole files run at once.
ALONE = $(filter tests/rdma% tests/gpu%,$(or $(TESTS),$(FOLDERS)))
BY_FILE = $(filter tests/endings% tests/netlab%,$(or $(TESTS),$(FOLDERS)))
SHARED = $(filter-out $(ALONE) $(BY_FILE),$(or $(TESTS),$(FOLDERS)))

# The distribution compiles pyverbs for its own Python, so the tests on ibverbs run with that Python.
RDMA_PYTHON ?= /usr/bin/python3
RDMA_VENV := $(VENV)/rdma
RDMA_BIN := $(RDMA_VENV)/bin

# torch is large, so only its tests install it, into an environment of its own for each version.
# The backend has two forms: for torch 2.13, and for torch 2.14 and newer.
TORCH_VERSION ?= 2.13.0
TORCH_VENV := $(VENV)/torch-$(TORCH_VERSION)
TORCH_BIN := $(TORCH_VENV)/bin
# Index with smaller builds for CPUs, such as https://download.pytorch.org/whl/cpu; the default index if empty.
TORCH_INDEX ?=

# Ray and JAX are large, too.
INTEROP_VENV := $(VENV)/interop
INTEROP_BIN := $(INTEROP_VENV)/bin

.PHONY: help demo demo-gpt test test-slow test-all test-rdma test-torch test-interop fresh test-docs lint test-matrix dist bench bench-degraded bench-rdma bench-gpu bench-scale simulate campaign chaos ptx pictures docs docs-serve clean
.DEFAULT_GOAL := help
# Tests and benchmarks measure time, so no two targets run at once.
.NOTPARALLEL:

# Prefix of a command that needs network namespaces: it runs the command in a user namespace unless
# the user is root. It is empty if the machine allows neither; the tests then skip with the reason.
ENTER = $(shell $(BIN)/r2ccl netlab --enter -- true >/dev/null 2>&1 && echo $(BIN)/r2ccl netlab --enter --)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo ## train a small model over four rails per node and lose one rail during the training
	@$(BIN)/python examples/train_digits.py

demo-gpt: $(TORCH_VENV)/.test ## train a GPT with torch on 4 nodes, lose 2 NICs and get them back; the picture is out/gpt.png
	@$(TORCH_BIN)/python examples/train_gpt.py

test: NFILES = $(WORKERS)
test-slow: NFILES = 2
test: $(VENV)/.test ## run all tests except the slow ones, in 4 to 9 minutes; TESTS="tests/unit/algos ..." selects tests
	@$(call pytest,$(if $(TESTS),,-m "not slow"))

test-slow: $(VENV)/.test ## run the tests that `make test` leaves out, in an hour; SLICE=0/6 runs a sixth of them
	@$(call pytest,-m slow $(if $(SLICE),--slice $(SLICE)))

test-all: test test-slow ## run all tests, the slow ones last

# One process more than cores, because many tests wait for processes that they started.
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(8, len(os.sched_getaffinity(0)) + 1))')

# A slice of the slow tests may have none of $(ALONE): pytest then exits with 5. For tests that the user names, it is an error.
NONE_FOUND = $(if $(TESTS),,5)

# Runs $(SHARED) on all cores, then $(BY_FILE) and $(ALONE); $(1) holds options of pytest. The code that most
# tests need is compiled first: otherwise hundreds of processes would each compile a part of it.
define pytest
TMPDIR=$$(mktemp -d) && export TMPDIR && trap 'rm -rf "$$TMPDIR"' EXIT || exit; status=0; \
	$(if $(TESTS),,echo "compiling code for the tests, once for this checkout: up to a minute"; \
	$(BIN)/python tests/support/precompile.py || exit;) \
	$(if $(SHARED),$(BIN)/python -m pytest $(1) -n $(WORKERS) $(SHARED) || status=$$?;) \
	$(if $(BY_FILE),$(ENTER) $(BIN)/python -m pytest $(1) -n $(NFILES) --dist loadfile $(BY_FILE) || status=$$?;) \
	$(if $(ALONE),$(BIN)/python -m pytest $(1) $(ALONE) || { code=$$?; [ "$$code" = "$(NONE_FOUND)" ] || status=$$code; };) \
	[ $$status -eq 0 ] && echo "make $@: all passed" || echo "make $@: FAILED, see above"; \
	exit $$status
endef

fresh: ## run the commands of the README in 15 kinds of minimal environments; FRESH="user ..." selects some
	@$(PYTHON) tests/fresh/matrix.py $(FRESH)

test-docs: ## follow the tutorial and all how-to pages with an installed wheel, in fresh environments; PAGES="howto/ray.md ..." selects some
	@$(PYTHON) tests/fresh/walkthroughs.py $(PAGES)

# The tests of verdicts need a third node. With -s, pytest does not capture output: capturing truncates
# an unlinked file, which the file system of the virtual machine (9p) does not support.
# The recipe calls make, not $(MAKE): `make -n` would run a line with $(MAKE), and all else on it.
test-rdma: ## run the tests on real ibverbs, with Soft-RoCE in a virtual machine, in 20 to 60 minutes; reports in out/rdma*.xml; SLICE=0/3 runs a third
	@if ! $(RDMA_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "test-rdma: skipped: $(RDMA_PYTHON), for which pyverbs is compiled, is missing or older than Python 3.11"; \
		exit 0; \
	fi; \
	make --no-print-directory $(RDMA_VENV)/.test || exit; \
	$(RDMA_BIN)/r2ccl rdmalab --prepare; status=$$?; \
	if [ $$status -eq 69 ]; then echo "test-rdma: skipped: for the reason above"; exit 0; fi; \
	[ $$status -eq 0 ] && mkdir -p out || exit $$status; \
	$(call rdmalab,2,3,rdma,tests/rdma --ignore tests/rdma/test_verdicts.py) && \
	$(call rdmalab,3,2,rdma3,tests/rdma/test_verdicts.py)

# Runs tests in a virtual machine of $(1) nodes with $(2) NICs each; the report is out/$(3).xml. The limit
# of time is for machines that emulate its processor on slow cores. A slice of the tests of verdicts may
# be empty: pytest then exits with 5.
rdmalab = { $(RDMA_BIN)/r2ccl rdmalab --nodes $(1) --nics $(2) --timeout 3600 -- \
		$(RDMA_BIN)/python -m pytest -s $(if $(SLICE),--slice $(SLICE)) --junitxml=out/$(3).xml $(4) || \
		[ "$$?" = "$(if $(SLICE),5)" ]; }

test-torch: $(TORCH_VENV)/.test ## run the tests of the backend for torch.distributed; downloads torch; TORCH_VERSION=2.15.0 selects one
	@$(ENTER) $(TORCH_BIN)/python -m pytest $(or $(TESTS),-m "not slow" tests/pytorch)

test-interop: $(INTEROP_VENV)/.test ## run the tests with Ray, Dask and JAX; downloads 0.8 GB
	@$(INTEROP_BIN)/python -m pytest $(or $(TESTS),tests/interop)

test-matrix: ## run `make test` with each Python of MATRIX that this machine has, each in 4 to 9 minutes
	@status=0; for version in $(MATRIX); do \
		python=$$(for each in python$$version $$HOME/.pyenv/versions/$$version*/bin/python; do \
			"$$each" -c 'import ensurepip, venv' 2>/dev/null && echo "$$each" && break; done); \
		if [ -z "$$python" ]; then \
			echo "test-matrix: Python $$version: skipped: python$$version is not on this machine"; continue; \
		fi; \
		echo "test-matrix: Python $$version: $$python"; \
		make --no-print-directory VENV=$(VENV)/$$version PYTHON="$$python" test || status=1; \
	done; exit $$status

dist: $(VENV)/.dist ## build wheel, sdist and SBOM in dist/, twice, and compare their hashes
	@export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); rm -rf dist && \
		$(BIN)/python -m build --outdir dist . && $(BIN)/python -m build --outdir dist/again . && \
		(cd dist && sha256sum *.whl *.tar.gz) > dist/SHA256SUMS && \
		(cd dist/again && sha256sum --check --quiet ../SHA256SUMS) && rm -rf dist/again && \
		$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz && \
		rm -rf $(VENV)/installed && $(PYTHON) -m venv --without-pip $(VENV)/installed && \
		$(PIP) --python $(VENV)/installed/bin/python install dist/*.whl && \
		$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
			--output-file dist/r2ccl.cdx.json $(VENV)/installed/bin/python && \
		cat dist/SHA256SUMS && du -sh $(VENV)/installed

lint: $(VENV)/.lint ## check style, types and layers
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --diff . && $(BIN)/mypy && \
		$(BIN)/pyright --pythonpath $(BIN)/python && $(BIN)/lint-imports --no-cache
	@echo "lint: style, types and layers are correct"

bench: $(VENV)/.bench ## compare with gloo and MPICH, and measure the cost of resilience; results in out/
	@mkdir -p out
	@$(BIN)/python bench/peers.py --json out/peers.json
	@$(BIN)/python bench/overhead.py --json out/overhead.json
	@$(BIN)/python bench/failover.py --json out/failover.json --png out/failover.png

bench-degraded: $(VENV)/.demo ## measure the slowdown by lost NICs, and the planner, in 45 minutes; results in out/
	@mkdir -p out; for what in cloudlab straggler planner collectives levels; do \
		$(BIN)/python bench/degraded.py --what $$what --json out/degraded-$$what.json || exit; \
	done

# The virtual machine emulates the processor, so the CPU time of the fast path is measured outside (--native).
bench-rdma: ## compare RDMA with perftest, in a virtual machine; results in out/verbs*.json
	@if ! $(RDMA_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "bench-rdma: skipped: $(RDMA_PYTHON), for which pyverbs is compiled, is missing or older than Python 3.11"; \
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

# CuPy and the compiler are large downloads, so they are installed only if there is a driver.
bench-gpu: ## test and measure everything that needs a GPU, in 9 minutes; results in out/gpu.json
	@if ! $(PYTHON) -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then \
		echo "bench-gpu: skipped: there is no NVIDIA driver here (libcuda.so.1)"; \
		exit 0; \
	fi; \
	make --no-print-directory $(VENV)/.gpu || exit; \
	mkdir -p out; \
	$(BIN)/python bench/gpu.py --json out/gpu.json; status=$$?; \
	if [ $$status -eq 69 ]; then echo "bench-gpu: skipped: for the reason above"; exit 0; fi; \
	exit $$status

bench-scale: $(VENV)/.demo ## measure the cost per rank for growing numbers of ranks; results in out/
	@mkdir -p out
	@$(BIN)/python bench/scale.py --json out/scale.json --png out/scale.png

simulate: $(VENV)/.test ## run 20,000 random fault plans in the simulator
	@R2CC_SIM_EXAMPLES=20000 $(BIN)/python -m pytest tests/simulation -n $(WORKERS) --timeout 7200

campaign: $(VENV)/.test ## run every fault 50 times on real sockets in network namespaces
	@R2CC_CAMPAIGN_RUNS=50 $(BIN)/python -m pytest tests/netlab --timeout 3600 -rA

chaos: $(VENV)/.test ## run random jobs with random faults on random netlabs; SECONDS=600 SEED=1
	@$(BIN)/python bench/chaos.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1); status=$$?; \
	if [ $$status -eq 69 ]; then echo "chaos: skipped: for the reason above"; exit 0; fi; \
	exit $$status

ptx: $(VENV)/.test ## compile the prebuilt kernels for GPUs anew, in 10 minutes; needs no GPU
	@$(BIN)/python -c 'from r2ccl.kernels.cuda.prebuilt import make; make()'

pictures: $(VENV)/.core ## redraw the pictures in docs/pictures/
	@for what in draw packages nic_loss; do $(BIN)/python docs/pictures/$$what.py || exit; done

# The variable silences an announcement of mkdocs-material.
docs: $(VENV)/.docs ## build the documentation as a site in out/site; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && \
		echo "docs: open out/site/index.html, which has no search; make docs-serve has it"

docs-serve: $(VENV)/.docs ## serve the documentation at http://127.0.0.1:8000, and build it again when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean: ## remove .venv, out, dist and build files
	rm -rf $(VENV) out build dist *.egg-info

# Stamp files, one per set of packages; a set is installed again when pyproject.toml changes. A larger set
# has the smaller ones in it, because each run of pip takes seconds.
$(VENV)/.python:
	@echo "making $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "r2ccl needs Python 3.11 or newer, which '$(PYTHON)' is not;" \
			"choose another with: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "r2ccl needs Python's venv module: apt-get install python3-venv"; exit 1; }
	@$(PIP) install "pip>=25.1"
	@touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml
	@echo "installing r2ccl into $(VENV) ..."
	@$(PIP) install --editable ".[compiled]"
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	@echo "installing r2ccl and the packages of the demo into $(VENV) ..."
	@$(PIP) install --editable ".[compiled,demo]"
	@touch $(VENV)/.core $@

$(VENV)/.test: $(VENV)/.python pyproject.toml
	@echo "installing r2ccl and the packages of the tests into $(VENV) ..."
	@$(PIP) install --editable ".[compiled,demo]" --group test
	@touch $(VENV)/.core $(VENV)/.demo $@

$(RDMA_VENV)/.test: $(VENV)/.core
	@echo "installing the packages of the tests on ibverbs into $(RDMA_VENV) ..."
	@test -x $(RDMA_BIN)/python || $(RDMA_PYTHON) -m venv --without-pip $(RDMA_VENV)
	@$(PIP) --python $(RDMA_BIN)/python install --editable ".[compiled]" --group test --group rdmalab
	@touch $@

$(TORCH_VENV)/.test: $(VENV)/.core
	@echo "installing the packages of the tests of torch into $(TORCH_VENV) ..."
	@test -x $(TORCH_BIN)/python || $(PYTHON) -m venv --without-pip $(TORCH_VENV)
	@$(PIP) --python $(TORCH_BIN)/python install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--editable ".[compiled,demo]" --group test-torch "torch==$(TORCH_VERSION)"
	@touch $@

$(INTEROP_VENV)/.test: $(VENV)/.core
	@echo "installing the packages of the tests of Ray, Dask and JAX into $(INTEROP_VENV) ..."
	@test -x $(INTEROP_BIN)/python || $(PYTHON) -m venv --without-pip $(INTEROP_VENV)
	@$(PIP) --python $(INTEROP_BIN)/python install --editable ".[compiled]" --group test-interop
	@touch $@

$(VENV)/.dist: $(VENV)/.core
	@echo "installing the packages that build a release ..."
	@$(PIP) install --group dist
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	@echo "installing the packages of the checks ..."
	@$(PIP) install --group lint
	@touch $@

# torch is not installed: the right build depends on the driver.
$(VENV)/.gpu: $(VENV)/.test
	@echo "installing CuPy and the bindings of the CUDA driver ..."
	@$(PIP) install --editable ".[gpu,cupy]"
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	@echo "installing the packages of the documentation ..."
	@$(PIP) install --group docs
	@touch $@

$(VENV)/.bench: $(VENV)/.demo
	@echo "installing the libraries to compare with ..."
	@$(PIP) install --group bench
	@touch $@
