PYTHON ?= python3
BIN := .venv/bin

# A file of tests is one worker's, so that what its tests share is made once; files with slow tests begin first.
PYTEST := $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

# Whoever starts Python over and over should not compile the same files each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install chromium run demo lint compiled check test test-ray mutants bench docs clean

install: .venv/.installed

# PIP_CONSTRAINT pins the build tools as well as the packages.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# The pages are tested in a browser. Without one, and without the right to get it, those tests are skipped.
chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1 || true; fi

run: install
	$(BIN)/shufflerl reproduce --quick

# make demo ARGS=--keep leaves its pages open until Ctrl-C.
demo: install
	$(BIN)/shufflerl demo $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Before tests begin, of which several at once would compile the same.
compiled: install
	$(BIN)/python -m tests.compile

check: install
	$(MAKE) --no-print-directory -j2 lint compiled
	$(PYTEST) -m 'not slow'

test: install chromium
	$(MAKE) --no-print-directory -j2 lint compiled
	$(PYTEST) --cov --cov-report=term:skip-covered

# Ray is an extra of its own and large, so these tests are skipped elsewhere.
test-ray: install
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --editable '.[dev,ray]'
	$(BIN)/pytest -k ray tests/experiments/test_sweep.py tests/experiments/test_reproduce.py

# Small faults, one at a time, and whether a test notices; for an evening, and no part of `make test`. Taken up where it
# stopped; make mutants ARGS='--most 50 --files noise' tries some.
mutants: install
	$(BIN)/python -m tests.mutants $(ARGS)

# The site needs nothing from outside: serve the folder, or open site/index.html, where only search is missing.
docs: install
	$(BIN)/python docs/assets/site.py site
	@echo 'The documentation is in site/: python3 -m http.server --directory site'

bench: install
	@$(MAKE) --no-print-directory .peer-venv/.installed || echo 'The peer cannot be installed here; its benchmarks will be skipped.'
	$(BIN)/python -m bench

# Only what the peer's UCBVI imports: its declared dependencies also bring Atari, a ROM licence and video tools.
.peer-venv/.installed: bench/peer-requirements.txt
	rm -rf .peer-venv
	$(PYTHON) -m venv .peer-venv
	PIP_DISABLE_PIP_VERSION_CHECK=1 .peer-venv/bin/python -m pip install --quiet --no-deps --requirement $<
	touch $@

clean:
	rm -rf .venv .peer-venv out site dist .coverage .mypy_cache .ruff_cache .pytest_cache
