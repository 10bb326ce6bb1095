# Two commands for a fresh machine with Python 3.11 or newer:  make demo,  make test.
# Both make .venv on first use, and mend it when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Of hypothesis, for the long tier: long (random examples) or repeatable (half as many, the same each time).
PROFILE ?= long
LONG = -m "(long or hypothesis) and not soak" --hypothesis-profile $(PROFILE)
TOGETHER = -q --numprocesses auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all check net browser gpu lint docs tables figures package compose-check bench soak versions clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-run
	$(BIN)/onebox train --data digits --model cnn

# The short tier, for every commit: tests/tiers.py says which test is of which tier. Tests of hosts skip where there is no
# root or no iproute2, those of GPUs where there is none.
# Bytecode is kept, whatever the environment says: dozens of processes import the same files.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: lint
	$(BIN)/pytest $(TOGETHER) -m short

# The long tier: all other tests, and those by hypothesis once more, with more examples, at random.
test-all: $(VENV)/.stamp-test
	$(BIN)/pytest $(TOGETHER) $(LONG)

# Hosts as network namespaces: as root, on a machine with iproute2.
net: $(VENV)/.stamp-test
	$(BIN)/pytest -q tests/net

# The page in a real browser: Debian's package chromium. SCREENSHOTS=docs/images renews the pictures in the pages.
browser: $(VENV)/.stamp-test
	ONEBOX_SCREENSHOTS=$(SCREENSHOTS) $(BIN)/pytest -q tests/browser

# On a machine with GPUs: all checks of them within half an hour, and a report in runs (docs/how-to/gpu.md). An environment that
# has PyTorch and the packages is used instead of .venv by  make gpu PYTHON_ENV=FOLDER;  arguments come in ARGS.
gpu: $(if $(PYTHON_ENV),,$(VENV)/.stamp-test)
	$(or $(PYTHON_ENV),$(VENV))/bin/python -m tests.gpu_run $(ARGS)

# The tests nearest to what has changed since the last commit, or since this branch left another one: SINCE=main.
check: lint
	@files=$$($(BIN)/python -m tests.nearest $(SINCE)) || exit; \
	if [ -z "$$files" ]; then echo "No test reaches what has changed."; else $(BIN)/pytest $(TOGETHER) -m short $$files; fi

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-logo

# The site, into build/site, without a network; a warning is an error.
docs: $(VENV)/.stamp-test
	$(BIN)/python -m sphinx -W -n -b html -d build/trees docs build/site

# One table of all figures that have a target; each benchmark ends within five minutes, or is ended.
bench: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/verdicts.py

# For the night: faults at random moments, random programs of views and writes, and the tests of no other tier; some hours.
soak: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/aliasing.py --programs 20000
	$(BIN)/pytest $(TOGETHER) -m soak

# The tests of what uses PyTorch's insides, with the other versions that are supported, each in an environment of its own.
# PyPI has builds for CUDA alone, of some gigabytes.
versions: OTHER ?= 2.11.0 2.12.0
versions:
	for version in $(OTHER); do \
	  $(PYTHON) -m venv $(VENV)-$$version && \
	  $(VENV)-$$version/bin/pip --quiet --disable-pip-version-check install torch==$$version -e '.[test]' && \
	  $(VENV)-$$version/bin/pytest $(TOGETHER) -m short tests/unit/graph tests/unit/vgpu tests/process/plain tests/process/vgpu \
	    || exit 1; \
	done

# The tables in docs, from the code: fields, errors, metrics, options.
tables: $(VENV)/.stamp-test
	$(BIN)/python -m docs.tables

# The pictures of README and docs, from recorded values.
figures: $(VENV)/.stamp-test
	$(BIN)/python docs/figures/draw.py

# Wheels and source distribution in dist, installed into a fresh environment and tried there from outside the sources. The
# environment downloads what it needs; with  ARGS=--outer  it uses the packages of .venv. A wheel with the object of the
# virtual device is made on Linux with g++, or the compiler that CXX names.
package: $(VENV)/.stamp-test
	$(BIN)/python -m tests.package_run --dist dist $(ARGS)

# The image and the compose file in docker, without an engine.
compose-check: $(VENV)/.stamp-test
	$(BIN)/pytest -q tests/unit/test_containers.py

clean:
	rm -rf $(VENV) $(VENV)-* build dist runs .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-run: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	@echo "Installing onebox into $(VENV)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	@echo "Installing onebox and its test tools into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

# torch comes first and by itself: the tested pin holds before anything else could ask for another version.
$(VENV)/.stamp-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "onebox needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name one that is:  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch into $(VENV) (a few minutes the first time)"
	@$(PIP) install -c constraints.txt torch
	@touch $@
