# A fresh machine needs Python 3.11 or newer (with its venv module) and make; everything else goes into $(VENV).
#   make demo     install, then let the embedded demo model tell a story
#   make test     install with the test tools, then lint, type-check and test, what depends on kernels at lower levels, too
#   make test-all   every case of every test, also the slow ones, and all that depends on kernels at lower levels
#   make test-plain the tests with RLX_PLATFORM=plain: without what only some operating systems have
#   make types-all  type-check as on Linux, macOS and Windows: finds calls that a system lacks
#   make test-page  the tests of the chat page and of reports in Chromium (apt-get install chromium), and screenshots in build/page
#   make test-cuda the tests that need an NVIDIA card
#   make docs     install what builds the documentation, then build it into build/docs/site; needs no network but for the install
#   make test-ray install Ray, then kill replicas, nodes and actors of local clusters; takes about 10 minutes
VENV ?= .venv
PYTHON ?= python3
JOBS ?= 2
BENCH_DIR ?= build/bench
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
# What is imported is compiled then: most modules of the packages never are.
INSTALL := $(PY) -m pip --disable-pip-version-check --quiet install --no-compile
LINTED := rlx tests benchmarks examples tools/site tools/release.py

# Tests start hundreds of processes: each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test lint types types-all pytest pytest-lower pytest-lower-all test-all test-plain test-page test-ray test-cuda docs bench clean
help:
	@echo "make demo | test | lint | types | types-all | pytest | test-all | test-plain | test-page | test-ray | test-cuda | docs | bench | clean   (see the Makefile's first lines)"

demo: $(VENV)/.rlx-installed
	@$(PY) -m rlx run "Tell me a story about a brave fox."

# Types are checked beside the first tests, which leave a processor idle now and then.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types pytest

lint: $(VENV)/.rlx-test-installed
	@$(PY) -m ruff check $(wildcard $(LINTED))

types: $(VENV)/.rlx-test-installed
	@$(PY) -m mypy

types-all: $(VENV)/.rlx-test-installed
	@for system in linux darwin win32; do \
	  $(PY) -m mypy --platform $$system --cache-dir .mypy_cache/$$system || exit 1; done

pytest: pytest-lower $(VENV)/.rlx-test-installed
	@$(PY) -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# Each level in a process of its own, side by side. Exit status 5: PYTEST_ARGS select none of these.
pytest-lower pytest-lower-all: $(VENV)/.rlx-test-installed
	@levels=$$($(PY) tests/targets.py) && test -z "$$levels" || $(MAKE) --no-print-directory --jobs $(JOBS) \
	  LOWER="$(if $(findstring all,$@),--all-cases,$$($(PY) tests/targets.py files))" $$(printf 'lower-%s ' $$levels)

lower-%:
	@RLX_TARGET=$* $(PY) -m pytest -m 'machine and not slow' $(LOWER) $(PYTEST_ARGS) || test $$? = 5

test-all: pytest-lower-all
	@$(PY) -m pytest -m '' --all-cases -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-plain: $(VENV)/.rlx-test-installed
	@RLX_PLATFORM=plain $(PY) -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-page: $(VENV)/.rlx-test-installed
	@$(PY) -c 'import playwright' 2>/dev/null || $(INSTALL) playwright
	@RLX_PAGE_SCREENSHOTS=build/page $(PY) -m pytest -m '' tests/serve/page tests/report $(PYTEST_ARGS)

# Tests that hold on the default device, whatever it is.
ON_CARDS := $(addprefix tests/, $(addprefix runners/test_, every_way.py batch.py cached.py draft_model.py eagle3.py images.py \
  image_sequences.py prediction.py seeing.py sessions.py speculative.py stopping.py disk_kv_cache.py) $(addprefix runtime/test_, rings.py \
  pages.py snapshot_file.py prefix_store.py) $(addprefix e2e/test_, same_bits.py requests.py kv_types.py) \
  vision/test_towers.py vision/test_encoder.py grammar/test_recurrent.py)

test-ray: $(VENV)/.rlx-test-installed
	@$(INSTALL) --editable '.[ray]'
	@$(PY) tests/on_ray/cluster.py

test-cuda: $(VENV)/.rlx-test-installed
	@$(PY) -m pytest tests/backends/cuda tests/backends/test_cuda_on_paper.py $(PYTEST_ARGS)
	@RLX_TEST_DEVICE=cuda $(PY) -m pytest -n $(JOBS) --dist worksteal $(ON_CARDS) $(PYTEST_ARGS)

docs: $(VENV)/.rlx-docs-installed
	@$(PY) tools/site/build.py

bench: $(BENCH_DIR)/qwen3-0.6b-Q8_0.gguf $(BENCH_DIR)/qwen3-0.6b-Q4_K_M.gguf
	@for model in $^; do $(PY) -m rlx bench $$model || exit 1; done

$(BENCH_DIR)/qwen3-0.6b-%.gguf: benchmarks/make_model.py | $(VENV)/.rlx-test-installed
	@$(PY) benchmarks/make_model.py --shape qwen3-0.6b --type $* --out $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find rlx tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an environment is installed again only when pyproject.toml changes. The install is editable, so code is not
# copied and never stale.
$(VENV)/.rlx-installed: pyproject.toml | $(VENV)/.rlx-venv
	@echo "installing rlx into $(VENV)"
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.rlx-test-installed: pyproject.toml | $(VENV)/.rlx-venv
	@echo "installing rlx and its test tools into $(VENV)"
	@$(INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.rlx-installed

$(VENV)/.rlx-docs-installed: pyproject.toml | $(VENV)/.rlx-venv
	@echo "installing rlx and what builds its documentation into $(VENV)"
	@$(INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/.rlx-installed

$(VENV)/.rlx-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rlx needs Python 3.11 or newer; name one, for example: make PYTHON=python3.12 demo"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { rm -f $(PY); exit 1; }
	@touch $@
