# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests run float32 on small nets: one torch thread a worker is fastest, and repeatable.
TEST_ENV := OMP_NUM_THREADS=1 SDL_VIDEODRIVER=dummy WANDB_MODE=offline HF_HUB_OFFLINE=1

.PHONY: demo test test-learning lint format docs clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not learning and not gpu"

test-learning: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m learning --timeout 2700

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pictures that the documentation shows, made anew.
docs: $(VENV)/.dev
	$(BIN)/python docs/make_env_pictures.py
	$(BIN)/python docs/make_report_pictures.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# PIP_CONSTRAINT holds for build environments too: nothing may pull another torch. What is imported is compiled then;
# compiling all that is installed takes longer.
PIP := PIP_CONSTRAINT=constraints.txt PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install -q
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.demo
