# One set-up for everything: a virtual environment in .venv, filled once and again only when its inputs change.
# `make PYTHON=python3.12 demo` chooses the interpreter (3.11 or newer); VENV= another place for the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Extra arguments for the demo, such as DEMO_FLAGS="--kill 1@3 --late 3@2".
DEMO_FLAGS ?=
# A soak: so many nodes for so many minutes under random faults (docs/soak.md), one every SOAK_MTBF seconds on average.
SOAK_MINUTES ?= 30
SOAK_NODES ?= 7
SOAK_MTBF ?= 6
SOAK_SEED ?= 0

.PHONY: demo soak test test-full lint setup clean

demo: $(VENV)/.installed
	$(BIN)/sparseloco-node swarm --nodes 4 --rounds 8 --state-dir .demo $(DEMO_FLAGS)

# Ends with a verdict: exit code 0 only if it passed. The JSON is kept in build/soak.json.
soak: $(VENV)/.installed
	@mkdir -p build
	$(BIN)/sparseloco-node swarm --nodes $(SOAK_NODES) --minutes $(SOAK_MINUTES) --mtbf $(SOAK_MTBF) --seed $(SOAK_SEED) \
		--state-dir build/soak --json > build/soak.json

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m "not full"

test-full: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/mypy -p sparseloco

setup: $(VENV)/.installed

# constraints.txt pins torch, so that pip takes the tested release and, where its configured links or indexes offer a
# CPU build of that release (2.13.0+cpu sorts above 2.13.0), that build.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[test]' 'setuptools>=77'
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed-test
	$(PIP) install --quiet -c constraints.txt -e '.[lint]'
	@touch $@

clean:
	rm -rf $(VENV) .demo build
