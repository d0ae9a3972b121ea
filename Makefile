# make run | test | test-slow | test-all | venv | check | format | audit | bench | fuzz | soak | sanitize | gpu-check:
# the commands of this repository. run installs what serving needs; the others also install the rest.
PYTHON ?= python3
VENV   ?= .venv
# The torch to install. On Linux, the default index has CUDA builds of several gigabytes; set TORCH_INDEX_URL to an
# index of CPU builds to avoid them. All other installs keep the torch of TORCH_SPEC.
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX_URL ?=

export OMP_WAIT_POLICY ?= PASSIVE
# Python keeps what it has compiled: else each process of each run compiles our 40,000 lines of tests anew.
unexport PYTHONDONTWRITEBYTECODE

BIN   := $(VENV)/bin
TORCH := $(VENV)/constraints.txt
BASE  := $(VENV)/.installed
ALL   := $(VENV)/.installed-all
# npm's openai, for one of the examples: version 6, since 7 needs node 22; and prettier, which lays out the page's files.
# Without npm, the example's test is skipped.
NODE  := $(if $(shell command -v npm),$(VENV)/node_modules/.installed)
INSTALL = $(BIN)/pip install --constraint $(TORCH) --editable

.DELETE_ON_ERROR:
.PHONY: run test test-slow test-all venv check format audit bench fuzz soak sanitize gpu-check
run: $(BASE)
	$(BIN)/linpix serve

venv: $(ALL)

$(TORCH): pyproject.toml setup.py $(wildcard csrc/*.* csrc/cuda/*.*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(BIN)/pip install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH_SPEC)'
	$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $@

$(BASE): $(TORCH)
	$(INSTALL) .
	touch $@

# It has all of the other installation, so the kernels are compiled once.
$(ALL): $(TORCH)
	$(INSTALL) '.[dev,train,ray,otel]'
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/openai-1 'openai>=1.99,<2'
	touch $(BASE) $@

$(VENV)/node_modules/.installed: | $(ALL)
	npm install --silent --no-save --no-package-lock --no-audit --no-fund --prefix $(VENV) 'openai@6' 'prettier@3.10.1' && \
	  touch $@ || echo "npm could not install openai and prettier: an example is not tested, and the page's layout not checked"

# Three tests at a time: half of a test is waiting for a server or a browser. More would need more cores than a server
# and its clients have.
PYTEST := $(BIN)/python -m pytest -q --numprocesses 3 --dist worksteal

# For contributors, takes some minutes: tests of every folder, one real server, one browser, one training.
test: venv $(NODE)
	$(PYTEST) -m "not slow"

test-slow: venv $(NODE)
	$(PYTEST) -m slow

test-all: venv $(NODE)
	$(PYTEST)

# The layout of Python, JavaScript and CSS, then lint, types and security. Without npm, the page's files are not looked at.
PRETTIER := $(VENV)/node_modules/.bin/prettier
PAGE := $(filter-out %swagger-ui-bundle.js %swagger-ui.css,$(wildcard server/static/*.js server/static/*.css))
check: venv $(NODE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	test ! -x $(PRETTIER) || $(PRETTIER) --log-level warn --check $(PAGE)
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive linpix model server setup.py training

# Lays out Python, JavaScript and CSS.
format: venv $(NODE)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .
	test ! -x $(PRETTIER) || $(PRETTIER) --log-level warn --write $(PAGE)

# Checks the installed packages for known vulnerabilities. It needs a database on the network, so check leaves it out.
audit: venv
	test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install --quiet pip-audit; }
	$(BIN)/pip freeze --exclude-editable | sed 's/+.*//' > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement $(VENV)/audit/installed.txt

bench: venv
	$(BIN)/python -m tools.benchmarks.decode

# Load and faults for twelve minutes, against servers on this machine; writes a table of the results.
soak: venv
	$(BIN)/python -m tests.soak --out build/soak.md

# The tests of tests/fuzz with many more cases; prints a table of the outcomes.
LINPIX_FUZZ_CASES ?= 100000
fuzz: venv
	LINPIX_FUZZ_CASES=$(LINPIX_FUZZ_CASES) $(BIN)/python -m pytest -q -o faulthandler_timeout=0 tests/fuzz

# Needs a CUDA GPU, a CUDA toolkit and a PYTHON with torch; uses no virtual environment and no network.
# CALL: some of its three parts, each of which takes at most ten minutes.
OUT ?= build/gpu-check
CALL ?= 1,2,3
gpu-check:
	$(PYTHON) -m tools.gpu_check --out $(OUT) --call $(CALL)

# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, with the portable kernels and with those of this
# processor; and their threads under ThreadSanitizer.
CXX ?= g++
CXXTEST := $(CXX) -std=c++20 -O1 -g -ffp-contract=off -Wall -Wextra -Wno-psabi -DLINPIX_ISA=portable \
           -Icsrc csrc/tests/test_kernels.cpp csrc/kernels.cpp csrc/decode.cpp csrc/team.cpp -pthread
sanitize:
	mkdir -p build
	$(CXXTEST) -fsanitize=address,undefined -fno-sanitize-recover=all -o build/test_kernels_asan
	build/test_kernels_asan
	$(CXXTEST) -march=native -fsanitize=address,undefined -fno-sanitize-recover=all -o build/test_kernels_native
	build/test_kernels_native
	$(CXXTEST) -fsanitize=thread -o build/test_kernels_tsan
	build/test_kernels_tsan
