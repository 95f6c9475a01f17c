# make demo   sets up, then runs the main job on the embedded default store
# make test   sets up, then runs the checks and the tests
# make bench  measures what logging costs, and what the store costs and gives
# make diagnosis  trains some hundred models, broken and healthy, and scores the analyzers by them
# make faults kills, starves and cuts off for some minutes, and counts what is lost
# make conformance  writes what each backend passes of the kit into docs/reference/conformance.md
# make clean  takes away what the set-up made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Many tests wait for other processes, so that one more than there are cores is quicker.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 1 + (os.cpu_count() or 1)))')
DIAGNOSIS_RUNS ?= diagnosis-runs

.DEFAULT_GOAL := help
.PHONY: help demo test check bench diagnosis faults conformance clean

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/train_digits.py

test: check
	$(BIN)/python -m pytest -q -n $(JOBS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/hot_path.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/service.py
	$(BIN)/python benchmarks/writers.py
	$(BIN)/python benchmarks/instrumentation.py
	$(BIN)/python benchmarks/diagnosis_comparison.py
	$(BIN)/python benchmarks/mirrors.py cost

diagnosis: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.diagnosis make --family all --seeds 0-4 --every 5 --jobs 2 --out $(DIAGNOSIS_RUNS)
	$(BIN)/python -m benchmarks.diagnosis score $(DIAGNOSIS_RUNS)

faults: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/durability.py all
	$(BIN)/python benchmarks/service_faults.py
	$(BIN)/python benchmarks/mirrors.py points kills

conformance: $(VENV)/dev.stamp
	PYTHONPATH=examples/third_party_backend/src $(BIN)/python -m pytest -q -n $(JOBS) \
		-p quark_core.testing.report --conformance-page docs/reference/conformance.md \
		tests/conformance/test_embedded.py tests/conformance/test_journal_store.py \
		tests/conformance/test_service.py tests/conformance/test_csv.py \
		tests/*_mirror/test_*_conformance.py \
		examples/third_party_backend/tests/test_jsonl_conformance.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

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
