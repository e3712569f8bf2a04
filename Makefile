# make demo    run a small CogVideoX that overflows fp16: black in plain fp16, correct with protection (output/demo)
# make check   run ruff, basedpyright, and the tests that load no pipeline and compile nothing
# make test    run those, and one real case of each kind (tests/tiers.toml), also in a real ComfyUI
# make test-slow  run the other tests that need no checkout of ComfyUI, and check the tests' types
# make test-all  run every test, in each ComfyUI that is found
# make comfyui-env CHECKOUT=~/ComfyUI  make an environment next to a ComfyUI checkout, in which tests run it
# make reliability  run the tests of faults, fuzzing, threads and long runs at full depth; write docs/reliability.md
# make audit   check the packages that tests run with for known vulnerabilities, by pip-audit (needs the internet)
# make bench   measure the cost of the guard and of scaled layers, and the cost and gain of compiling
# make docs    write docs/precision.md from the tables in precision/, locales/en from the nodes, subgraphs/ from
#              workflows/, and docs/comfyui-surface.md from comfyui_host/
# Each target makes .venv if it is missing. This needs Python 3.10 to 3.13, a C compiler and PyPI or a mirror of it.
# PYTHON=python3.12 chooses the interpreter. To use the pack in ComfyUI you need no make: see README.md.

PYTHON ?= python3
TORCH := torch==2.13.0
BESIDE_TORCH := torchvision==0.28.0 torchaudio==2.11.0

# -qq prints errors only: with -q pip repeats a warning for every package
PIP := -m pip install -qq --disable-pip-version-check
SUPPORTED := import sys; v = sys.version_info[:2]; \
	sys.exit(0 if (3, 10) <= v <= (3, 13) else f"{sys.executable} is Python {v[0]}.{v[1]}: the pinned packages need 3.10 to 3.13. Choose one: make PYTHON=python3.12")

# keep bytecode, whatever the shell sets: tests start hundreds of processes, and each would compile the pack again
export PYTHONDONTWRITEBYTECODE :=

# number of pytest processes, with one thread each
JOBS ?= 2
TESTS := .venv/bin/python -m pytest -n $(JOBS)

# next to the checkout, where tests find it
ENVIRONMENT = $(patsubst %/,%,$(CHECKOUT))-venv

# folders that basedpyright checks after every change; tests/ takes as long again and is checked in `make test-slow`
TYPED := __init__.py __main__.py comfyui_host demo headless nodes pipelines precision scripts trust

# runs in a separate process, since it measures the process's memory
SOAK := tests/faults/test_soak.py

.PHONY: demo check check-tests test test-tests test-slow test-slow-tests test-all comfyui-env reliability audit lint types bench docs clean

demo: .venv/.installed
	.venv/bin/onediff-guard demo

check: .venv/.installed
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint check-tests

check-tests: .venv/.installed
	$(TESTS) --tier check

# make builds .venv-comfyui while lint runs
test: .venv/.installed
	@$(MAKE) --no-print-directory --jobs=2 lint test-tests

test-tests: .venv/.installed .venv-comfyui/.installed
	$(TESTS) --tier test

test-slow: .venv/.installed .venv-comfyui/.installed
	@$(MAKE) --no-print-directory --jobs=2 types test-slow-tests

test-slow-tests: .venv/.installed .venv-comfyui/.installed
	$(TESTS) --tier slow

test-all: lint types .venv-comfyui/.installed
	.venv/bin/python -m pytest $(SOAK)
	$(TESTS) --ignore $(SOAK)

reliability: .venv/.installed .venv-comfyui/.installed
	$(TESTS) tests/faults --ignore $(SOAK) --write-figures
	.venv/bin/python -m pytest $(SOAK) --write-figures

# --strict: fails too if the advisories of a package cannot be read. To ignore one, explain it in SECURITY.md.
audit:
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/python $(PIP) pip-audit; }
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints/test.txt
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints/comfyui-0.0.1.txt

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright $(TYPED)

types: .venv/.installed
	.venv/bin/basedpyright

bench: .venv/.installed
	.venv/bin/python scripts/benchmarks/guard.py --heads 4 --rounds 20
	.venv/bin/python scripts/benchmarks/learning.py --heads 2 --rounds 8
	.venv/bin/python scripts/benchmarks/scaled_layers.py --heads 4
	.venv/bin/python scripts/benchmarks/compiled.py --rounds 10

docs: .venv/.installed
	.venv/bin/python scripts/english_locale.py
	.venv/bin/python scripts/blueprints.py
	.venv/bin/python scripts/comfyui_surface.py
	.venv/bin/python scripts/precision_page.py

clean:
	rm -rf .venv .venv-audit .venv-comfyui build comfyui_onediff_guard.egg-info

# torch comes first, and the constraints pin it too, so that no other package replaces it
.venv/.installed: constraints/test.txt pyproject.toml
	@$(PYTHON) -c '$(SUPPORTED)'
	@test -x .venv/bin/python || { echo "Making .venv with $$($(PYTHON) --version): a few minutes"; $(PYTHON) -m venv .venv; }
	@.venv/bin/python -c '$(SUPPORTED)'
	.venv/bin/python $(PIP) $(TORCH)
	.venv/bin/python $(PIP) -c constraints/test.txt setuptools
	.venv/bin/python $(PIP) -c constraints/test.txt --no-build-isolation -e '.[test,bench,scale]'
	@mkdir -p .venv/importable && ln -sfn ../.. .venv/importable/comfyui_onediff_guard
	@touch $@

# torch comes first and stays; torchvision and torchaudio are installed without their own torch. `requests` is missing in
# the requirements of an older ComfyUI, and ComfyUI's own tests need the packages after it
comfyui-env:
	@test -f '$(CHECKOUT)/main.py' || { echo "CHECKOUT='$(CHECKOUT)' has no main.py. Name the folder of a ComfyUI: make comfyui-env CHECKOUT=~/ComfyUI"; exit 1; }
	@test -x '$(ENVIRONMENT)/bin/python' || { echo "Making $(ENVIRONMENT): a few minutes"; $(PYTHON) -m venv '$(ENVIRONMENT)'; }
	'$(ENVIRONMENT)/bin/python' $(PIP) $(TORCH)
	grep -vE '^torch(vision|audio)?([^a-z]|$$)' '$(CHECKOUT)/requirements.txt' | '$(ENVIRONMENT)/bin/python' $(PIP) $(TORCH) \
		-r /dev/stdin -r requirements.txt requests pytest pytest-aiohttp pytest-asyncio websocket-client
	'$(ENVIRONMENT)/bin/python' $(PIP) --no-deps $(BESIDE_TORCH)
	'$(ENVIRONMENT)/bin/python' tests/comfyui/cpu_wheels.py

# A separate environment with the oldest ComfyUI and libraries that the pack supports: constraints/ lists them
.venv-comfyui/.installed: constraints/comfyui-0.0.1.txt tests/comfyui/cpu_wheels.py
	@$(PYTHON) -c '$(SUPPORTED)'
	@test -x .venv-comfyui/bin/python || { echo "Making .venv-comfyui for the tests in ComfyUI: a few minutes"; $(PYTHON) -m venv .venv-comfyui; }
	@.venv-comfyui/bin/python -c '$(SUPPORTED)'
	.venv-comfyui/bin/python $(PIP) $(TORCH)
	.venv-comfyui/bin/python $(PIP) --no-deps -r constraints/comfyui-0.0.1.txt
	.venv-comfyui/bin/python tests/comfyui/cpu_wheels.py
	@touch $@
