# The two commands of the README, `make demo` and `make test`; each does all of its own set-up.

PYTHON ?= python3
# Where the demo writes, and whether its server runs on afterwards: make demo OUT=somewhere KEEP=1
OUT ?= demo-run
KEEP ?=
# Installed first and by an exact version: what needs torch asks for a range, and a range would take the newest
# build there is, gigabytes of CUDA among them. A local build such as 2.13.0+cpu satisfies this pin and is preferred.
TORCH ?= torch==2.13.0

# Files of tests that run at a time, one more than the cores of a small machine: tests also wait. 0: all in one
# process, as for a debugger
JOBS ?= 3

BIN := .venv/bin
# seconds since 1970, for the row of set-up in the table the demo ends with
BEGAN := $(shell date +%s)
# PYTHONDONTWRITEBYTECODE is emptied: where it is set, each of the hundreds of processes that tests start would compile
# our modules again
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
          --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PACKAGES := packages/mega-schema[model] packages/mega-data packages/mega-train[plot] packages/mega-ckpt \
            packages/mega-serve packages/mega-eval

# Meta's own model, with which the tests compare. Installed without its dependencies, which would bring CUDA
REFERENCES := fairscale==0.4.13 llama-models==0.3.0

.PHONY: demo test test-long soak test-lowest check clean

demo: .venv/demo.stamp  ## from text to a chat, on this machine
	$(BIN)/python demo/run.py --output "$(OUT)" --began $(BEGAN) $(if $(KEEP),--keep)

test: .venv/test.stamp  ## every test but the long ones; shared data is looked for in MEGA_SHARED, by default ../shared
	$(PYTEST)

test-long: .venv/test.stamp  ## the long tests: kills by the dozen, thousands of drawn cases, the whole parity matrix
	$(PYTEST) -m long

soak: .venv/test.stamp  ## a server under random load for MEGA_SOAK_MINUTES, by default 20, and a fuzzer of its API
	MEGA_SOAK_MINUTES=$${MEGA_SOAK_MINUTES:-20} $(PYTEST) -n 0 -s -m long tests/faults/test_serving_soak.py

test-lowest:  ## the unit tests of the packages with the lowest versions that their metadata allow
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" .ci/test-lowest

check: .venv/test.stamp  ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(wildcard packages/*/src) demo
	$(BIN)/lint-imports

clean:  ## what these commands made, apart from OUT
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/demo.stamp: Makefile $(wildcard packages/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: PYTHON: Python 3.11 or newer is needed: found $(PYTHON), %d.%d; hint: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv .venv
	@echo "installing into .venv; the first time this takes minutes"
	$(PIP) "$(TORCH)"
	$(PIP) "hatchling>=1.25" editables
	$(PIP) --no-build-isolation $(foreach package,$(PACKAGES),-e "$(package)")
	@touch $@

.venv/test.stamp: .venv/demo.stamp requirements-test.txt
	$(PIP) -r requirements-test.txt
	$(PIP) --no-build-isolation --no-deps $(REFERENCES)
	$(PIP) --no-build-isolation -e packages/mega-schema -e "packages/mega-data[all]" -e "packages/mega-serve[cpu,plot,ray]"
	@touch $@
