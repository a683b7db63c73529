# Three commands do all the set-up on a fresh machine: `make play`, `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With Triton. The other tests run without it, as on a machine that has no GPU.
EXTRAS := .venv-extras
DOCS := .venv-docs
# Packages that do not go with the others: metaworld pins another MuJoCo, envpool is large.
METAWORLD := .venv-metaworld
ENVPOOL := .venv-envpool
# Tests run float32 on small nets: one torch thread a worker is fastest, and repeatable.
TEST_ENV := OMP_NUM_THREADS=1 SDL_VIDEODRIVER=dummy WANDB_MODE=offline HF_HUB_OFFLINE=1

.PHONY: play demo test coverage test-learning test-extras test-suites lint format docs docs-images clean

# A page in which one plays inside a learned dream, before anything was trained. AGENT: boxing, obstacles, bounce or catch.
AGENT ?= boxing
play: $(VENV)/.play
	$(BIN)/rl-lab play example://$(AGENT) -w --web --open

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not learning and not gpu and not extras"

# The same tests; fails when they execute less than 90 % of the package's lines ([tool.coverage.report]).
coverage: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not learning and not gpu and not extras" \
	  --timeout 900 --cov --cov-report term:skip-covered

test-learning: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m learning --timeout 2700

# The Triton kernels on a CPU in the interpreter, wheel and sdist in a clean environment, site, notebooks, ONNX; then
# the commands and the Python of the site's pages.
EXTRAS_TESTS := TRITON_INTERPRET=1 $(TEST_ENV) $(EXTRAS)/bin/python -m pytest -m extras
test-extras: $(EXTRAS)/.dev
	$(EXTRAS_TESTS) --ignore tests/test_docs_run.py
	$(EXTRAS_TESTS) -n 2 --dist worksteal tests/test_docs_run.py

# The cases of Meta-World, ProcGen and EnvPool that the other targets skip. ProcGen: apt install libqt5gui5.
SUITE_TESTS := pytest tests/environments tests/config/test_configs.py --timeout 900
test-suites: $(METAWORLD)/.dev $(ENVPOOL)/.dev
	$(TEST_ENV) $(METAWORLD)/bin/python -m $(SUITE_TESTS) -k metaworld
	$(TEST_ENV) $(ENVPOOL)/bin/python -m $(SUITE_TESTS) -k "envpool or procgen or carracing or space_invaders"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site, in build/site; a broken link is an error. RL_LAB_REPOSITORY: address of the repository.
docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "build/site/index.html"

# The images of the documentation.
docs-images: $(VENV)/.dev
	$(BIN)/python scripts/dev/environment_images.py
	$(BIN)/python scripts/dev/report_images.py
	$(BIN)/python scripts/dev/result_figures.py
	$(BIN)/python scripts/dev/diagrams.py

clean:
	rm -rf $(VENV) $(EXTRAS) $(DOCS) $(METAWORLD) $(ENVPOOL) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# pip compiles all that it installs: where PYTHONDONTWRITEBYTECODE is set, every process would compile torch again.
INSTALL := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install -q
# PIP_CONSTRAINT holds for build environments too: nothing may pull another torch.
PIP := PIP_CONSTRAINT=constraints.txt $(INSTALL)
# Only files whose hashes are in requirements/*.lock; builds, too, use the setuptools from there.
HASHED := $(INSTALL) --require-hashes --no-deps --no-build-isolation --use-pep517
# What the locks are for. Asked when an install begins: by then the venv is there.
PLATFORM = $(shell $(BIN)/python -c 'import platform as p; print(p.system(), p.machine(), p.python_version(), sep="-")')
LOCKED = $(filter Linux-x86_64-3.11.% Linux-x86_64-3.12.%,$(PLATFORM))

# torch has no hash: its file differs between machines with and without CUDA.
define install_locked
$(HASHED) -r requirements/build.lock
$(HASHED) -r requirements/$(1).lock
$(PIP) torch
$(INSTALL) --no-deps --no-build-isolation -e '.[$(1)]'
$(BIN)/pip check
$(BIN)/python scripts/dev/lock.py --check
endef
install = $(if $(LOCKED),$(install_locked),$(PIP) -e '.[$(1)]')
NEEDS := $(VENV)/bin/python pyproject.toml constraints.txt $(wildcard requirements/*.lock)

$(VENV)/.demo: $(NEEDS)
	@echo "installing PyTorch and the other packages into $(VENV): 300 MB, 2.5 GB with CUDA; some minutes"
	$(call install,demo)
	touch $@

$(VENV)/.play: $(NEEDS)
	@echo "installing PyTorch and the other packages into $(VENV): 300 MB, 2.5 GB with CUDA; some minutes"
	$(PIP) -e '.[demo,play]'
	touch $@

$(VENV)/.dev: $(NEEDS)
	@echo "installing PyTorch and the packages of the tests into $(VENV): 1 GB, 3 GB with CUDA; some minutes"
	$(call install,dev)
	touch $@ $(VENV)/.demo $(VENV)/.play

$(DOCS)/.docs: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(DOCS)/bin/pip install -q -c constraints.txt -r requirements/docs.txt
	touch $@

$(EXTRAS)/.dev: pyproject.toml constraints.txt requirements/docs.txt
	$(PYTHON) -m venv $(EXTRAS)
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(EXTRAS)/bin/pip install -q -e '.[dev,extras]' \
	  -r requirements/docs.txt
	touch $@

# constraints.txt has the MuJoCo of dm_control.
$(METAWORLD)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(METAWORLD)
	grep -v '^mujoco==' constraints.txt > $(METAWORLD)/constraints.txt
	PIP_CONSTRAINT=$(METAWORLD)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(METAWORLD)/bin/pip install -q \
	  -e '.[demo,metaworld]' pytest pytest-timeout hypothesis
	touch $@

$(ENVPOOL)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENVPOOL)
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(ENVPOOL)/bin/pip install -q -e '.[dev,envpool]'
	touch $@
