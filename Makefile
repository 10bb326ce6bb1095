# Two commands for a fresh machine with Python 3.11 or newer:  make demo,  make test.
# Both make .venv on first use, and mend it when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
BENCHMARKS := $(patsubst %,benchmarks/%.py,opening remote eager coverage correctness lengths scaling replicas memory hybrid prediction pipeline adaptive staleness transfers recovery feed security operator_fuzz simd links slow_links launchers finetune)

# Of hypothesis, for the long tier: long (random examples) or repeatable (as many, the same each time).
PROFILE ?= long
LONG = -m "long or hypothesis" --hypothesis-profile $(PROFILE)
TOGETHER = -q --numprocesses auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all net gpu lint bench soak clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-run
	$(BIN)/onebox train --data digits --model cnn

# The short tier, for every commit: less than eight minutes on two cores. tests/conftest.py says which test is of which
# tier, in which order they come, and how many at a time. Those of tests/net skip where there is no root or no iproute2,
# those of tests/gpu where there is no GPU.
# Bytecode is kept, whatever the environment says: dozens of processes import the same files.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: lint
	$(BIN)/pytest $(TOGETHER) -m "not long"

# The long tier: all other tests, and those by hypothesis once more, with more examples, at random.
test-all: $(VENV)/.stamp-test
	$(BIN)/pytest $(TOGETHER) $(LONG)

# Hosts as network namespaces: as root, on a machine with iproute2.
net: $(VENV)/.stamp-test
	$(BIN)/pytest -q tests/net

# On a machine with GPUs: all checks of them within half an hour, and a report in runs (docs/gpu.md). An environment that
# has PyTorch and the packages is used instead of .venv by  make gpu PYTHON_ENV=FOLDER;  arguments come in ARGS.
gpu: $(if $(PYTHON_ENV),,$(VENV)/.stamp-test)
	$(or $(PYTHON_ENV),$(VENV))/bin/python -m tests.gpu_run $(ARGS)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/.stamp-test
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# For the night: half an hour and more.
soak: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) dist runs .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
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
