# Each target does its own set-up. Needs Python 3.11 to 3.13; the tests also need a C compiler (cc).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# oneDNN's newest bf16 kernels die of SIGILL under some hypervisors that announce AMX; one thread is
# faster than two for models as small as the demo's.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test coverage test-slow test-newest test-oldest test-documents test-distributed test-browser test-gpu test-hosts test-host-versions test-ai-toolkit test-comfyui test-import test-trackers check format lint types bench docs wheels release test-install clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt setup.py src/gracetune/memory/shim.c src/gracetune/data/bulk_copy.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all cores; pip would use one
	@touch $@

venv: $(STAMP)  ## make .venv with pinned dependencies

demo: venv  ## train the demo, then a LoRA on top of it, and check the images
	$(BIN)/gracetune train examples/demo.json
	$(BIN)/gracetune train examples/demo-lora.json
	$(BIN)/python examples/judge_shapes.py runs/demo
	$(BIN)/python examples/judge_shapes.py runs/demo-lora --min-colour 0.85 --min-shape 0.85
	@echo 'Images: runs/demo/validation and runs/demo-lora/validation'

# In the order of LONGEST in tests/conftest.py, so that no long file starts last, with one core idle.
# Three workers for two cores: tests that start processes wait for them a third of their time.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

test: venv  ## the tests, on two cores
	$(BIN)/python -m pytest $(PARALLEL)

coverage: venv  ## the tests with coverage, which takes a few minutes longer
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term --cov-fail-under=97

test-slow: venv  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-documents: venv  ## run the commands of README and docs, on miniatures
	$(BIN)/python -m pytest -m slow tests/e2e/test_document_commands.py

# uv installs the oldest versions that pyproject.toml allows, which pip cannot. The tools of the tests
# are the newest ones, of which old packages may use something deprecated. Each target needs 8 GB,
# because torch brings CUDA. Golden runs start from the random weights that diffusers and transformers
# make, which differ in old versions. transformers before 5.13 needs torchvision for image processors.
NEWEST_PYTHON ?= python3.13
OLDEST_PYTHON ?= python3.12
NEWEST := .hosts/newest
OLDEST := .hosts/oldest
EXTRAS := $(shell sed -nE 's/.*"gracetune\[(.*)\]".*/\1/p' pyproject.toml)

test-newest:  ## the tests with the newest versions of all packages, as pip installs them today
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(NEWEST)/bin/uv pip install --quiet --python $(NEWEST) --upgrade --editable '.[dev]'
	PYTHONPATH=src $(NEWEST)/bin/python -m pytest $(PARALLEL)

test-oldest:  ## the tests with the oldest versions that pyproject.toml allows
	$(OLDEST_PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST) --resolution lowest-direct --editable '.[$(EXTRAS),optimizers]' 'torchvision>=0.26'
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST) --editable '.[dev]'
	PYTHONPATH=src $(OLDEST)/bin/python -m pytest -o filterwarnings=default --ignore tests/golden/test_golden.py $(PARALLEL)

# Half an hour. The test with two network namespaces needs root.
test-distributed: venv  ## kill ranks at random moments, and separate machines
	$(BIN)/python -m pytest -m distributed

# Debian's Chromium, not one that playwright downloads: apt-get install chromium
test-browser: venv  ## the dashboard and reports in a real browser, with planted faults
	@command -v chromium >/dev/null || { echo 'test-browser needs Chromium: apt-get install chromium' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt playwright
	$(BIN)/python -m pytest -m browser tests/browser

# Broken links, warnings and outdated generated pages are errors.
docs: venv  ## build the documentation site in build/site
	$(BIN)/python scripts/build_docs.py

test-gpu: venv  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu

# SimpleTuner wants Python 3.12 and 7 GB of its own, and must not meet the trainer's environment.
HOST_PYTHON ?= python3.12
HOST := .hosts/simpletuner
HOST_BIN := $(HOST)/bin
HOST_SUITE := $(HOST)/simpletuner-4.10.1
HOST_VERSIONS := 4.6.0 4.6.1 4.7.0 4.7.1 4.8.0 4.9.0 4.9.1 4.9.2 4.9.3 4.10.0
HOST_MODULES ?=
HOST_TESTS := $(filter-out %_versions.py,$(wildcard $(CURDIR)/tests/hosts/test_simpletuner_*.py $(CURDIR)/tests/hosts/test_upstream_*.py))

$(HOST)/.installed:
	$(HOST_PYTHON) -m venv $(HOST)
	$(HOST_BIN)/python -m pip install --quiet torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0 simpletuner==4.10.1
	$(HOST_BIN)/python -m pip install --quiet blake3 cramjam cuda-bindings pytest pytest-timeout simplejpeg
	$(HOST_BIN)/python -m pip install --quiet 'torchao>=0.17,<0.18' aiohttp ldap3
	# transformers 5.23 lacks a name that SimpleTuner 4.10.1 imports; 5.8 wants these kernels.
	$(HOST_BIN)/python -m pip install --quiet transformers==5.8.0 'kernels<0.13'
	$(HOST_BIN)/python -m pip download --quiet --no-deps --no-binary simpletuner --no-build-isolation --dest $(HOST) simpletuner==4.10.1
	@touch $@

$(HOST)/clone:
	git clone --quiet https://github.com/bghira/SimpleTuner $@

# The source distribution has the tests, and leaves out what they import from beside them.
$(HOST_SUITE)/.whole: $(HOST)/.installed | $(HOST)/clone
	tar -xzf $(HOST_SUITE).tar.gz -C $(HOST) $(addprefix simpletuner-4.10.1/,tests pyproject.toml setup.py README.md)
	commit=$$(git -C $(HOST)/clone rev-parse --quiet --verify v4.10.1 || echo HEAD) && git -C $(HOST)/clone archive $$commit tests scripts documentation config Dockerfile ':(exclude,glob)tests/test_*.py' | tar -x -C $(HOST_SUITE)
	ln -sfn ../lib/python3.12/site-packages/simpletuner $(HOST_SUITE)/simpletuner
	@touch $@

# SimpleTuner leaves its log in the folder that it is imported in: its own.
test-hosts: $(HOST_SUITE)/.whole  ## gracetune inside a real SimpleTuner, and that one's own tests; HOST_MODULES=a picks some
	cd $(HOST) && PYTHONPATH=$(CURDIR)/src $(CURDIR)/$(HOST_BIN)/python -m pytest -c $(CURDIR)/pyproject.toml -o filterwarnings=default $(HOST_TESTS)
	$(HOST_BIN)/python tests/hosts/run_upstream_suite.py $(HOST_SUITE) $(HOST_MODULES)

$(HOST)-versions/%/.installed: $(HOST)/.installed
	$(HOST_BIN)/python -m pip install --quiet --no-deps --no-compile --target $(@D) simpletuner==$*
	@touch $@

test-host-versions: $(HOST_VERSIONS:%=$(HOST)-versions/%/.installed)  ## every hook in every SimpleTuner from 4.6 on
	PYTHONPATH=$(CURDIR)/src $(HOST_BIN)/python -m pytest -o filterwarnings=default tests/hosts/test_simpletuner_versions.py

# ai-toolkit is a clone, and its packages go on top of those that SimpleTuner has brought.
AITK := .hosts/ai-toolkit
AITK_ENV := .hosts/ai-toolkit-env
AITK_BIN := $(AITK_ENV)/bin

$(AITK):
	git clone --quiet https://github.com/ostris/ai-toolkit $@

$(AITK_ENV)/.installed: $(HOST)/.installed
	$(HOST_BIN)/python -m venv $(AITK_ENV)
	$(HOST_BIN)/python -c 'import site; print(*site.getsitepackages())' > $$($(AITK_BIN)/python -c 'import site; print(*site.getsitepackages())')/simpletuner.pth
	$(AITK_BIN)/python -m pip install --quiet albumentations==1.4.15 albucore==0.0.16 oyaml flatten_json kornia lpips pytorch_fid pytorch-wavelets python-slugify prodigyopt mutagen python-dotenv toml opencv-python-headless
	$(AITK_BIN)/python -m pip install --quiet --no-deps controlnet_aux==0.0.10 bitsandbytes
	@touch $@

test-ai-toolkit: $(AITK_ENV)/.installed | $(AITK)  ## gracetune inside a real ai-toolkit, on a small Wan 2.2
	PYTHONPATH=src CUDA_VISIBLE_DEVICES= ACCELERATE_USE_CPU=1 NO_ALBUMENTATIONS_UPDATE=1 $(AITK_BIN)/python -m pytest -o filterwarnings=default tests/hosts/test_ai_toolkit_host.py

# Only ComfyUI's loader of adapters is imported; it needs no other packages than the tests.
COMFYUI := .hosts/comfyui

$(COMFYUI):
	git clone --quiet --depth 1 https://github.com/comfyanonymous/ComfyUI $@

test-comfyui: venv | $(COMFYUI)  ## `adapter check` against ComfyUI's own functions
	COMFYUI=$(COMFYUI) $(BIN)/python -m pytest -m hosts tests/hosts/test_comfyui.py

# The configs that both publish are read where they are; set the folders to test other versions.
SIMPLETUNER ?= $(HOST)/clone
AI_TOOLKIT ?= $(AITK)

test-import: venv | $(SIMPLETUNER) $(AI_TOOLKIT)  ## import and train every config that SimpleTuner and ai-toolkit publish
	SIMPLETUNER=$(SIMPLETUNER) AI_TOOLKIT=$(AI_TOOLKIT) $(BIN)/python -m pytest -m hosts tests/hosts/test_import_*.py

# The trackers' packages need other versions of some pinned ones, so they get an environment on top.
TRACKERS := .hosts/trackers

$(TRACKERS)/.installed: constraints-trackers.txt | $(STAMP)
	$(BIN)/python -m venv $(TRACKERS)
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' > $$($(TRACKERS)/bin/python -c 'import site; print(*site.getsitepackages())')/gracetune.pth
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-trackers.txt wandb trackio mlflow-skinny sqlalchemy alembic
	@touch $@

test-trackers: $(TRACKERS)/.installed  ## Weights & Biases, trackio and MLflow themselves, offline
	PYTHONPATH=$(CURDIR)/src $(TRACKERS)/bin/python -m pytest -o filterwarnings=default tests/hosts/test_real_trackers.py

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: venv
	$(BIN)/mypy

check: lint types coverage  ## format, lint, types, tests with coverage

bench: venv  ## per-step overhead over a bare loop
	$(BIN)/python benchmarks/bare_loop.py --write

wheels: venv  ## build and check the wheels for x86_64 and aarch64, and the source distribution
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt auditwheel build ziglang
	$(BIN)/python scripts/build_wheels.py

# twine gets an environment of its own, which sees the packages of the other one.
RELEASE := .hosts/release

$(RELEASE)/.installed: | $(STAMP)
	$(BIN)/python -m venv $(RELEASE)
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' > $$($(RELEASE)/bin/python -c 'import site; print(*site.getsitepackages())')/gracetune.pth
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check twine
	@touch $@

release: wheels $(RELEASE)/.installed $(TRACKERS)/.installed  ## build the release in dist/, and check contents, licences and an installation
	$(TRACKERS)/bin/python scripts/licenses.py --check
	$(RELEASE)/bin/python scripts/check_release.py

# Needs root, debootstrap and qemu-user-static.
test-install: wheels  ## the README's commands in a new Debian without a compiler, and the aarch64 wheel under qemu
	WHEELS=dist $(BIN)/python -m pytest -m hosts -s tests/hosts/test_install.py

clean:  ## remove the environment and the demo's runs
	rm -rf $(VENV) dist runs/demo runs/demo-lora .pytest_cache .mypy_cache .ruff_cache
