# The two commands: `make demo` and `make test`. Both create .venv when it is missing and are quick when it is there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo serve test test-slow test-npu lint bench clean

$(VENV)/.core: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,grammar]'
	@touch $@

demo: $(VENV)/.core  ## checkpoint, convert, serve at K=7, one completion over HTTP
	$(BIN)/python tools/demo.py

serve: $(VENV)/.core  ## serve the demo model on port 8000; ARGS='--port 9000' adds flags
	$(BIN)/python tools/demo.py --serve $(ARGS)

test: $(VENV)/.test  ## lint and the default tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "not slow" $(ARGS)
	$(BIN)/python -m pytest --jaxtyping-packages=dsv4.ops.plain,dsv4.ops.plain_state,beartype.beartype tests/oracle  # annotations are checked here

test-slow: $(VENV)/.test  ## the longer tests
	$(BIN)/python -m pytest -m slow $(ARGS)

test-npu:  ## lowering through the real torchair, in a venv of its own; needs no NPU
	test -x .venv-npu/bin/python || $(PYTHON) -m venv .venv-npu
	.venv-npu/bin/python -m pip install --quiet --disable-pip-version-check -e '.[npu,test]'
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-npu/bin/python -m pytest tests/graph -k npu $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: demo  ## speed: dsv4 bench, then transformers in the same run
	$(BIN)/dsv4 bench --model build/demo/w8a8 --json build/bench.json --svg build/bench.svg
	$(MAKE) $(VENV)/.test
	$(BIN)/python -m bench.against_transformers --model build/demo/w8a8

clean:
	rm -rf $(VENV) build *.egg-info
