# The only set-up entry points; each makes .venv if it is missing or older than the dependency files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONFIG ?= configs/quickstart.toml
ARGS ?=
INSTALL ?= 1
DEVICE ?= cuda

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-integrations test-guests lint docs docs-serve dist dist-check bench gpu gpu-wheels bench-convergence bench-convergence-long bench-convergence-tune clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

# A Debian without python3-venv has no ensurepip: make the environment without pip and let the system's pip fill it.
# torch goes first, from constraints.txt, so that nothing else may choose another build of it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lather needs Python 3.11 or newer; set PYTHON=" >&2; exit 2; }
	@rm -rf $(VENV)
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); else \
	    $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip -q --python $(BIN)/python install pip; fi
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,hf,lm-eval]'
	@touch $@

train: $(READY)  ## train configs/quickstart.toml (CONFIG=... ARGS='--optim.lr 1e-3' change that)
	$(BIN)/lather train $(CONFIG) $(ARGS)

test test-all: export PYTHONDONTWRITEBYTECODE :=  # modules and tests are compiled once, not in each process
test: $(READY)  ## the test suite
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-all: $(READY)  ## the suite and the whole grid of meshes against one process: hours on two cores
	$(BIN)/python -m pytest -m "grid or not grid" $(ARGS)

test-integrations: $(READY)  ## the optimizers under other people's trainers (installs them)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[integrations]'
	$(BIN)/python -m pytest -m integrations tests/integrations $(ARGS)

# Their versions do not go together with those of constraints.txt, or with this Python: they come before .venv on the path, without what they need.
GUESTS := $(VENV)/guests
test-guests: $(READY)  ## the same with torchtitan 0.3 and emerging-optimizers, from a folder of their own (installs them)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt tyro
	@rm -rf $(GUESTS)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --ignore-requires-python --target $(GUESTS) torchtitan==0.3.0 spmd_types emerging-optimizers==0.3.0
	PYTHONPATH=$(GUESTS)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python -m pytest -m integrations tests/integrations/test_torchtitan_names.py tests/integrations/test_emerging_optimizers.py $(ARGS)

lint: $(READY)  ## ruff check, ruff format, mypy in strict mode, the order of rooms, names and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/house.py

docs: $(READY)  ## the documentation site, into site/ (installs mkdocs-material); a warning is an error
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would hide warnings from --strict, too

docs-serve: docs  ## the same at http://127.0.0.1:8000, built anew when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

# The sdist is made of the checkout and the wheel of the sdist, by the setuptools of .venv; a file has the commit, which neither could ask git for.
dist: $(READY)  ## an sdist and a wheel, in dist/
	@rm -rf dist
	@$(BIN)/python -c 'from lather.version import find_commit; print(find_commit() or "")' >src/lather/commit.txt
	@trap 'rm -f src/lather/commit.txt' EXIT; $(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >dist.log || { cat dist.log >&2; exit 1; }
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist dist/lather-*.tar.gz
	@rm -f dist.log; ls dist

dist-check: dist  ## both of them in an environment of their own, away from the checkout
	$(BIN)/python .ci/dist_check.py dist

bench: $(READY)  ## the benchmarks of memory and pipeline, then the optimizers' against heavyball and pytorch_optimizer (installs them; tens of minutes on two cores)
	$(BIN)/lather bench memory
	OMP_NUM_THREADS=1 $(BIN)/lather bench pipeline
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/lather bench optimizer $(ARGS)

GPU = PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(1) -m benchmarks.gpu --device $(DEVICE) $(if $(filter cpu,$(DEVICE)),--small) $(ARGS)

ifeq ($(INSTALL),0)
gpu:  ## everything that has to be measured on a GPU, in at most 12 minutes; goes on where it stopped (ARGS='--minutes 9': in calls of nine; DEVICE=cpu rehearses; PYTHON=python3 INSTALL=0 installs nothing)
	$(call GPU,$(PYTHON))
else
gpu: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(call GPU,$(BIN)/python)
endif

# For Python 3.12 on x86-64, whatever this machine is. They have to travel, so there is a limit.
gpu-wheels:  ## the wheels that a GPU machine without network lacks beside torch, into wheels/
	@rm -rf wheels
	$(PYTHON) -m pip download -q --disable-pip-version-check -c constraints.txt --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d wheels $$($(PYTHON) -c 'from benchmarks.gpu.needs import WHEELS; print(*WHEELS)')
	@ls wheels
	@size=$$(du -sk wheels | cut -f1); echo "$$size KiB in wheels/"; [ "$$size" -le 65536 ] || { echo "wheels/ may have 65536 KiB at most: take wheels from WHEELS in benchmarks/gpu/needs.py" >&2; exit 1; }

bench-convergence: $(READY)  ## which rule learns how fast: the short study (an hour on two cores; may be stopped, goes on)
	$(BIN)/lather bench convergence run benchmarks/studies/short.toml $(ARGS)

bench-convergence-long: $(READY)  ## the same in runs of 21 M tokens (eight hours, over as many sittings as you like: ARGS='--minutes 60')
	$(BIN)/lather bench convergence run benchmarks/studies/long.toml $(ARGS)

bench-convergence-tune: $(READY)  ## the search of rates for the short study (hours; may be stopped, goes on)
	$(BIN)/lather bench convergence run benchmarks/studies/tune.toml $(ARGS)

clean:  ## remove the environment, what was built and what training wrote
	rm -rf $(VENV) runs data site dist wheels
