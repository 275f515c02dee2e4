PYTHON ?= python3
BIN := .venv/bin

.PHONY: install run test bench clean

install: .venv/.installed

# PIP_CONSTRAINT pins the build tools as well as the packages.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

run: install
	$(BIN)/shufflerl run riverswim --learner ucbvi --privatizer none --episodes 20000 --seeds 10 --plot out/regret.png

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto

bench: install
	$(BIN)/python -m bench

clean:
	rm -rf .venv out .mypy_cache .ruff_cache .pytest_cache
