# Two commands do everything: `make demo` and `make test`. Python 3.11 or later as PYTHON.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install lint test test-here test-oldest test-slow demo lock clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or later is needed, PYTHON=$(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[dev]'
	@# An archive of the repository has text files in place of these links, which mypy needs.
	@for folder in callbacks configs; do [ -d lit_knn/$$folder ] || ln -sf ../$$folder lit_knn/$$folder; done
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto

# The numerical rooms run a second time with the oldest instructions, because a test must not prove one processor.
NUMERICAL := common theory index reference estimators sampling metrics
OLDEST := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41
# Their arithmetic is that of other people's networks, or they measure memory.
ONCE := metrics/test_fidelity.py::test_numbers_equal_torch_fidelity_on_images_and_weights \
	metrics/test_fidelity.py::test_nonfinite_pictures_are_refused_and_equal_ones_measured \
	estimators/test_exact.py::test_the_pieces_of_a_set_leave_their_memory_to_the_next
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Both run side by side, because tests that wait for other processes leave a core idle. The second tells its result at its end.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 test-here test-oldest

test-here:
	$(BIN)/pytest $(PARALLEL)

test-oldest:
	@text=$$($(OLDEST) $(BIN)/pytest -q -m "not slow and not gpu" $(ONCE:%=--deselect tests/%) $(NUMERICAL:%=tests/%) 2>&1); \
	status=$$?; echo "$$text"; exit $$status

# Tests that take minutes, or whose paths cheaper tests take.
test-slow: install
	$(BIN)/pytest -m slow --timeout=1800 -n auto --maxprocesses 4 --dist worksteal

# The versions of this environment, with which the tests passed; pip takes the file with --constraint.
lock: install
	$(BIN)/python -m pip list --format=freeze --exclude lit-knn --exclude pip > requirements.lock

demo: install
	$(BIN)/python main.py fit -c configs/demo.yaml

# The documentation as a site in build/docs, with warnings as errors and all links checked.
.PHONY: docs
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
