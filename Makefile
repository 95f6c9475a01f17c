# make demo   sets up, then runs the main job on the embedded default store
# make quick  runs what belongs before each commit, on any interpreter: make quick PYTHON=python3.13
# make test   sets up, then runs the checks and the tests, but for the long ones
# make long   runs what make test leaves out: the long tests, and those that draw examples with all of them
# make test-all  runs make test and make long
# make bench  measures what logging costs, and what the store costs and gives
# make diagnosis  trains some hundred models, broken and healthy, and scores the analyzers by them
# make verdicts  simulates runs of which the truth is known, and counts verdicts that are false
# make why    trains some hundred times with a known change between, and scores what `quark why` says of it
# make faults kills, starves and cuts off for some minutes, and counts what is lost
# make conformance  writes what each backend passes of the kit into docs/extend/conformance.md
# make reference  writes docs/reference/api and docs/reference/cli.md from docstrings and help texts
# make docs   builds the site of the docs into build/docs/site, and follows each of its links
# make gpu    runs what needs a CUDA device, or says by name what was skipped without one
# make clean  takes away what the set-up made

PYTHON ?= python3
VENV := .venv
DOCS_VENV := .venv-docs
BIN := $(VENV)/bin
# Many tests wait for a disk or for other processes, so that more than there are cores is quicker.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 2 + (os.cpu_count() or 1)))')
DIAGNOSIS_RUNS ?= diagnosis-runs
WHY_RUNS ?= why-runs
PAGE_MODULES := quark/page/static
# Neighbours stay together, so that a server that they share starts once; who is done takes from the others.
PYTEST := pytest -q -n $(JOBS) --dist worksteal
# An environment for each interpreter, beside that of the development tools.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
QUICK_VENV := .venv-$(VERSION)
QUICK_TESTS ?= $(addprefix tests/quark_core/,backends config delivery records runs search sessions system writers) tests/quark/analysis tests/quark_backends/store \
  $(addprefix tests/quark/provenance/test_,normal_form.py code_changes.py code_reach.py)

.DEFAULT_GOAL := help
.PHONY: help demo quick test long test-all check bench diagnosis verdicts why faults conformance reference docs gpu clean

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/train_digits.py

test: check
	$(BIN)/python -m $(PYTEST) -m "not long"

long: $(VENV)/dev.stamp
	$(BIN)/python -m $(PYTEST) -m "long or hypothesis" --hypothesis-profile full

test-all:
	$(MAKE) test
	$(MAKE) long

quick: $(QUICK_VENV)/quick.stamp
	$(QUICK_VENV)/bin/python -m $(PYTEST) -m "not long" $(QUICK_TESTS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/architecture/room_sizes.py
	$(BIN)/python tests/docs/prose.py --check
	$(BIN)/oxlint --import-plugin --deny-warnings $(PAGE_MODULES) tests/quark/page/modules
	$(BIN)/deno check --quiet --config tests/quark/page/modules/deno.json $(wildcard $(addsuffix /*.js,$(PAGE_MODULES) $(addprefix $(PAGE_MODULES)/,charts data pages report widget) tests/quark/page/modules))

# What runs say of themselves would stand between the figures.
bench diagnosis faults: export QUARK_QUIET = 1

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/hot_path.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/service.py
	$(BIN)/python benchmarks/writers.py
	$(BIN)/python benchmarks/instrumentation.py
	$(BIN)/python benchmarks/comparison_cost.py
	$(BIN)/python benchmarks/mirrors.py cost
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/notebook.py
	$(BIN)/python benchmarks/claims.py rate
	$(BIN)/python benchmarks/sweep_storage.py

diagnosis: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.diagnosis make --family all --seeds 0-4 --every 5 --jobs 2 --out $(DIAGNOSIS_RUNS)
	$(BIN)/python -m benchmarks.diagnosis score $(DIAGNOSIS_RUNS)

verdicts: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/verdicts.py

why: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.explanation_exam --out $(WHY_RUNS)

faults: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/durability.py
	$(BIN)/python benchmarks/service_faults.py
	$(BIN)/python benchmarks/mirrors.py points kills
	$(BIN)/python benchmarks/claims.py campaign
	$(BIN)/python benchmarks/sweep_campaign.py

conformance: $(VENV)/dev.stamp
	PYTHONPATH=examples/third_party_backend/src $(BIN)/python -m pytest -q -n $(JOBS) \
		-p quark_core.testing.report --conformance-page docs/extend/conformance.md \
		tests/conformance/test_embedded.py tests/conformance/test_journal_store.py \
		tests/conformance/test_service.py tests/conformance/test_csv.py \
		tests/quark_backends/*/test_*_conformance.py \
		examples/third_party_backend/tests/test_jsonl_conformance.py

reference: $(VENV)/dev.stamp
	$(BIN)/python docs/site/reference.py --write

docs: $(DOCS_VENV)/docs.stamp
	$(DOCS_VENV)/bin/python docs/site/build.py

clean:
	rm -rf $(VENV) $(DOCS_VENV) .venv-3.* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The base environment: Quark with PyTorch, and what the demo needs.
$(VENV)/demo.stamp: pyproject.toml .ci/constraints.txt .ci/make_venv.sh hatch_build.py $(wildcard quark_torch/kernels/*.[ch])
	@PYTHON="$(PYTHON)" sh .ci/make_venv.sh $(VENV)
	@echo "Installing Quark, PyTorch and scikit-learn into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt "torch>=2.4"
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[torch]" --group demo
	@touch $@

# What the checks and the tests need besides.
$(VENV)/dev.stamp: $(VENV)/demo.stamp
	@echo "Installing the development tools into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --group dev
	@touch $@

# What the site of the docs needs: it reads Quark's source and imports none of it.
$(DOCS_VENV)/docs.stamp: pyproject.toml .ci/constraints.txt .ci/make_venv.sh
	@PYTHON="$(PYTHON)" sh .ci/make_venv.sh $(DOCS_VENV)
	@echo "Installing Zensical into $(DOCS_VENV) ..."
	$(DOCS_VENV)/bin/python -m pip install --quiet --constraint .ci/constraints.txt --group docs
	@touch $@

# What the quick tests need: no PyTorch, of which not every interpreter has a build.
$(QUICK_VENV)/quick.stamp: pyproject.toml .ci/constraints.txt .ci/make_venv.sh
	@PYTHON="$(PYTHON)" sh .ci/make_venv.sh $(QUICK_VENV)
	@echo "Installing Quark and pytest into $(QUICK_VENV) ..."
	QUARK_BUILD_KERNEL=0 $(QUICK_VENV)/bin/python -m pip install --quiet --constraint .ci/constraints.txt --editable . --group quick
	@touch $@

# What needs a CUDA device, one test at a time. An interpreter that has PyTorch for the device already,
# and what the tests need, is taken by: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_TESTS ?= tests
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/dev.stamp)
	$(GPU_PYTHON) -m pytest -v -m gpu $(GPU_TESTS)
	$(GPU_PYTHON) benchmarks/instrumentation.py --device cuda
	$(GPU_PYTHON) benchmarks/writers.py steps --device cuda
