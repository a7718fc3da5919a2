# The commands of this repository. Everything runs in .venv, made from requirements.lock.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
TEST_PROCESSES ?= 2
SOAK_SECONDS ?= 60
PEERS ?= .peers
MOONCAKE_TRACES ?= ../shared/traces

BIN := .venv/bin
READY := .venv/.made

.PHONY: help demo serve test check soak bench figures clean
help:
	@echo "make demo    a real model, served by a cluster of processes, checked against one process"
	@echo "make serve   the same cluster until Ctrl-C: HOST=$(HOST) PORT=$(PORT) MODEL=checkpoint, GGUF or preset:tiny"
	@echo "make test    the tests              make soak    the long ones: SOAK_SECONDS=$(SOAK_SECONDS)"
	@echo "make check   lint, format, types, import directions"
	@echo "make bench   the engine, beside what is installed in PEERS=$(PEERS), if anything"
	@echo "make figures the paper's figures, simulated, into build/figures and docs/results.md: MOONCAKE_TRACES=folder of traces"
	@echo "make clean   remove .venv and everything that was made"

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version): make PYTHON=python3.12"; exit 1; }
	@test -f .venv/.created || { $(PYTHON) -m venv --clear .venv && touch .venv/.created; }
	@echo "installing into .venv (the first time, a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(READY)
	@$(BIN)/python -m launch.demo

serve: $(READY)
	@$(BIN)/python -m launch.cluster --host=$(HOST) --port=$(PORT) --model="$(MODEL)"

test: $(READY)
	@$(BIN)/python -m launch.fetch || echo "without the model, tests of its real weights are skipped"
	$(BIN)/python -m pytest tests -m "not soak" --numprocesses=$(TEST_PROCESSES) --dist=loadfile

soak: $(READY)
	SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest tests -m soak

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest tests/test_imports.py

bench: $(READY)
	$(BIN)/python -m launch.bench --suite=engine --json=build/engine.json $(if $(wildcard $(PEERS)/),--peers="$(PEERS)")

figures: $(READY)
	@$(BIN)/python -c "import matplotlib" 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check "matplotlib>=3.9"
	$(BIN)/python -m launch.experiment --config=all --traces=$(MOONCAKE_TRACES) --results=docs/results.md

clean:
	rm -rf .venv build demo run .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
