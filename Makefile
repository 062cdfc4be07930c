PYTHON ?= python

.PHONY: install lint type unit compile emulated integration gpu test docs docs-slow wheel-check ci

install:
	$(PYTHON) -m pip install -e '.[dev]'

lint:
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check

type:
	$(PYTHON) -m mypy

unit:
	$(PYTHON) -m pytest tests/unit

compile:
	$(PYTHON) -m pytest tests/compile

emulated:
	$(PYTHON) -m pytest tests/emulated

integration:
	$(PYTHON) -m pytest tests/integration

gpu:
	$(PYTHON) -m pytest -n 0 tests/gpu

test:
	$(PYTHON) -m pytest

# What scripts write of docs/, and tests hold against the code.
docs:
	$(PYTHON) -m tests.support.problem_space
	$(PYTHON) -m tests.support.coverage
	$(PYTHON) -m profiling.roles_page
	$(PYTHON) -m profiling.stored_vs_recomputed --refresh docs
	$(PYTHON) -m tests.support.documents

# The same where it takes many minutes, an idle machine or another package.
docs-slow:
	$(PYTHON) -m tests.support.mutation_report
	OMP_NUM_THREADS=1 $(PYTHON) -m profiling.stored_vs_recomputed --device cpu --write docs
	$(PYTHON) -m profiling.compare_sass

wheel-check:
	PYTHON=$(PYTHON) bash .ci/wheel-check

ci:
	bash .ci/run
