# `make demo` and `make test` need nothing but Python 3.11-3.13 and this checkout: each makes what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  := models/SmolLM2-135M-Instruct
RUN    ?= runs/smollm2-135m

.PHONY: setup demo test lint bench clean

setup: $(VENV)/.done

# torch first and alone: where a CPU build is the newest that pip finds, everything behind it keeps that build.
$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

# The newest torch that was tested. A CUDA machine takes its own: make setup TORCH=torch
TORCH  ?= torch==2.13.0

$(MODEL)/config.json: | setup
	$(BIN)/python -m qad.demo_model $(MODEL)

demo: setup $(MODEL)/config.json
	$(BIN)/qad run smollm2-135m --out $(RUN)

test: setup
	$(BIN)/python -m pytest -q $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pydoclint --quiet qad export harness reports

bench: setup
	$(BIN)/python tests/bench/fake_quantize.py

clean:
	rm -rf $(VENV) runs models build *.egg-info
