# What developers and CI run. Every target makes .venv by itself where it is missing or older than
# pyproject.toml; `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiling every file of torch and the rest takes a minute; what is imported is compiled then.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
# A path entry and no import hook: a folder named octavo beside a script must not hide the package.
EDITABLE := --config-settings editable_mode=compat
# Bytecode is kept whatever the caller's environment says: all later processes read it.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Each worker starts with half of the files, in order, and shares their fixtures; one that is done takes of the other.
WORKERS := -n 2 --dist worksteal
# What make coverage measures.
COVERED := ops nn serve/engine rl
# The full environment and the lighter one of the demo; the full one serves for both. The site's tools come on top.
DEV := $(VENV)/.installed-dev
DEMO := $(VENV)/.installed-demo
DOCS := $(VENV)/.installed-docs

.PHONY: help demo setup test test-slow test-ci test-nightly test-largest test-gpu test-ecosystem coverage mutants lint format types layers docs bench size convergence rl-learning

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(DEV): pyproject.toml
	@echo "installing octavo and its developer tools into $(VENV) (about a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) $(EDITABLE) -e '.[dev]'
	@touch $(DEMO) $(DEV)

$(DEMO): pyproject.toml
	@echo "installing octavo into $(VENV) (under a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) $(EDITABLE) -e '.[plots]'
	@touch $(DEMO)

demo: $(DEMO)  ## the main job: FP8 beside bf16, trained, sampled and reinforced (ARGS="--seconds 60")
	$(BIN)/octavo demo $(ARGS)

setup: $(DEV)  ## make .venv and install everything for development

test: $(DEV)  ## the fast tests (ARGS="tests/ops -k quantize")
	$(PYTEST) $(WORKERS) $(ARGS)

test-slow: $(DEV)  ## the slow tests
	$(PYTEST) $(WORKERS) -m 'slow and not gpu and not nightly and not largest and not ecosystem' --timeout 1800 $(ARGS)

test-ci: $(DEV)  ## the fast and the slow tests in one run, as CI has them
	@$(MAKE) --no-print-directory test ARGS="-m 'not gpu and not nightly and not largest and not ecosystem' --timeout 1800 $(ARGS)"

test-nightly: $(DEV)  ## the long matrices of faults and attackers, recorded in bench/records/nightly.json
	$(PYTEST) $(WORKERS) -p tests.nightly -m nightly --timeout 1800 $(ARGS)

test-largest: $(DEV)  ## the largest variants of other tests: four ranks, long batches, toys of whole benchmarks
	$(PYTEST) $(WORKERS) -m largest --timeout 1800 $(ARGS)

test-gpu: $(DEV)  ## the tests that need a GPU; another machine's torch may warn, so warnings are no errors
	$(PYTEST) -m gpu -W default $(ARGS)

# A row's environment: what ecosystem/ROW.txt pins (after # --no-deps: without dependencies), and octavo. Tests that the
# ordinary suite has too run in it as well.
.ecosystem/%/.installed: ecosystem/%.txt pyproject.toml
	@echo "installing octavo and $* into .ecosystem/$* (minutes)"
	@$(PYTHON) -m venv .ecosystem/$*
	@.ecosystem/$*/bin/python -m pip install -qq --disable-pip-version-check $(EDITABLE) -r $< -e .
	@sed -n 's/^# --no-deps //p' $< | xargs -r .ecosystem/$*/bin/python -m pip install -qq --disable-pip-version-check --no-deps
	@touch $@

test-ecosystem: $(if $(ROW),.ecosystem/$(ROW)/.installed)  ## octavo inside a framework, recorded in ecosystem/ROW.json (ROW=huggingface)
	@test -n "$(ROW)" || { echo "name a row: ROW=$(subst $() ,| ROW=,$(patsubst ecosystem/%.txt,%,$(wildcard ecosystem/*.txt)))"; exit 2; }
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.ecosystem/$(ROW)/extensions OMP_NUM_THREADS=1 .ecosystem/$(ROW)/bin/python -m pytest -p tests.ecosystem.record -m 'not gpu' -W default \
		tests/ecosystem/test_$(ROW).py $(wildcard tests/integrations/test_$(ROW).py) $(ARGS)

coverage: $(DEV)  ## the fast tests' coverage of ops, nn, serve/engine and rl (ARGS="tests/rl")
	$(PYTEST) $(WORKERS) $(addprefix --cov=octavo/,$(COVERED)) --cov-report= $(ARGS)
	@for part in $(COVERED); do printf '%-14s' $$part; \
		$(BIN)/coverage report --include="octavo/$$part/*" --format=total --precision=2; done

mutants: $(DEV)  ## break each rule once, in a copy, and see its test fail (ARGS="tis-uncapped")
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(DEV)  ## style, format and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

format: $(DEV)  ## fix what lint can fix by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV)  ## the type checker
	$(BIN)/mypy

layers: $(DEV)  ## the import rules, and the packages with their imports counted
	PATH="$(CURDIR)/$(BIN):$$PATH" lint-imports
	$(BIN)/python docs/tools/import_picture.py

$(DOCS): $(DEV) pyproject.toml
	@$(PIP_INSTALL) $(EDITABLE) -e '.[docs]'
	@touch $(DOCS)

docs: $(DOCS)  ## run the code blocks of README.md and docs/, check links, build the site in site/
	$(PYTEST) tests/test_docs.py -m 'not gpu' $(ARGS)
	$(BIN)/python docs/tools/site.py

bench: $(DEV)  ## speed records
	$(BIN)/python -m bench $(ARGS)

convergence: $(DEV)  ## the loss gate: every FP8 recipe against bf16 over 5 seeds (2 minutes on an H200, hours on 2 cores)
	$(BIN)/python -m bench.training.convergence $(ARGS)

rl-learning: $(DEV)  ## the RL gate: exact FP8 and bf16 over 3 seeds (about 8 minutes on 2 cores)
	$(BIN)/python -m bench.rl_matrix.rl_learning $(ARGS)

size:  ## lines a file, the files over 400, and the tables of docs/size.md
	@find octavo -name '*.py' | xargs wc -l | sort -n
	@echo "over 400 lines:"
	@find octavo tests bench -name '*.py' 2>/dev/null | xargs wc -l | awk '$$2 != "total" && $$1 > 400'
	@$(PYTHON) docs/tools/size.py
