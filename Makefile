# Each target does its own set-up; a stamp file makes every later run skip it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CUDA_SOURCES := $(wildcard kernels_src/*.cuh kernels_src/*/*.h kernels_src/*/*.cu kernels_src/*/*.cuh)
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)  # in a container, where root is all there is

.PHONY: notebooks lab test bench verify gpu report clean

notebooks: $(VENV)/runtime.stamp  ## execute every notebook, top to bottom
	$(BIN)/python -m workbench.execute

lab: $(VENV)/runtime.stamp  ## open JupyterLab
	$(BIN)/jupyter lab $(AS_ROOT) --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_loader.ipynb

test: $(VENV)/test.stamp  ## formatting, lint and all tests
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

bench: $(VENV)/runtime.stamp  ## measure everything on this machine's GPU
	$(BIN)/python -m workbench bench

verify: $(VENV)/runtime.stamp  ## check everything on this machine's GPU
	$(BIN)/python -m workbench verify

gpu: $(VENV)/test.stamp  ## all that needs a GPU; `make gpu STEPS="tests bench"` runs some steps only
	PYTHON=$(BIN)/python benchmarks/on_gpu.sh $(STEPS)

report: $(VENV)/runtime.stamp  ## plots and README tables from results/
	$(BIN)/python -m workbench report

clean:  ## remove the environment and everything that was generated
	rm -rf $(VENV) build *.egg-info results/executed tests/artefacts

$(VENV)/runtime.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/runtime.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@
