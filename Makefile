PYTHON ?= python

.PHONY: install lint type unit compile emulated integration gpu test wheel-check ci

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

wheel-check:
	PYTHON=$(PYTHON) bash .ci/wheel-check

ci:
	bash .ci/run
