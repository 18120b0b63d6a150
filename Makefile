# A newcomer needs only `make demo` and `make test`. Each target makes its prerequisites.
# PYTHON is the interpreter for .venv (3.11 to 3.13). ARGS is passed to pytest or the benchmark.
# `make test ARGS="--hypothesis-profile=explore"` draws examples that no run has tried before.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The driver of a browser is installed only next to a browser.
CHROMIUM := $(shell command -v chromium || command -v chromium-browser)

# VERSIONS=gpu selects the versions of a rented GPU machine, in an environment of their own (5 GB). PYTHON_3_12 is its
# interpreter.
PYTHON_3_12 ?= python3.12
GPU_VENV := .venv-gpu
IS_GPU := $(filter gpu,$(VERSIONS))

# Compose v2 if it is installed, else docker-compose 1.29. `make up GPU=1` adds the GPU.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
COMPOSE_FILES := --file docker-compose.yml $(if $(GPU),--file docker-compose.gpu.yml)

.DEFAULT_GOAL := help
.PHONY: help install hashes pin-images demo test test-variants test-browser dashboard-pictures coverage test-cookbook test-compose test-chart test-kernels test-gpu rehearse-gpu test-faults soak mutants compatibility lint format pictures docs pages models proto bench bench-engine up down clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Create .venv with all dependencies

# Every package is checked against pins/hashes.txt, except torch, whose build the index chooses. For a list of
# packages pip checks hashes, but not for a project folder. So the list is installed first, then the project.
# The pip of the interpreter puts the pinned one there, which saves 5 s; without a recent pip, ensurepip does.
# Modules are compiled at their first import, because most are never imported.
$(INSTALLED): pyproject.toml constraints.txt pins/hashes.txt
	@echo "Making $(VENV), some two minutes: 1/4 an empty one, and pip …"
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --no-compile --require-hashes --requirement pins/pip.txt 2>/dev/null || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --require-hashes --requirement pins/pip.txt
	@echo "Making $(VENV): 2/4 torch, the largest, of some 200 MB …"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-deps torch
	@echo "Making $(VENV): 3/4 all other dependencies …"
	$(BIN)/python pins/requirements_of.py all objects otel >$(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --no-compile --require-hashes --constraint pins/hashes.txt --requirement $(VENV)/requirements.txt --group dev $(if $(CHROMIUM),--group browser)
	@echo "Making $(VENV): 4/4 cotrain …"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

hashes: ## Regenerate pins/ after a change of constraints.txt (needs uv)
	pins/make.sh

pin-images: ## Write the digests of the base images into .env (needs access to the image registry)
	docker/pin-images.sh

demo: $(INSTALLED) ## Train four tenants at once on this machine, then a policy from its own samples
	$(BIN)/python examples/demo.py

test: $(INSTALLED) ## Run every test that needs no GPU and no container engine (five processes, 13 GB; ARGS="-n 2" halves the memory)
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/conformance/sdks.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/cookbook/fetch.sh
	$(BIN)/python -m pytest -n 5 --dist loadscope --no-loadscope-reorder -p tests.support.covered_lines $(ARGS)

test-variants: $(INSTALLED) ## Run the rows of tables of tests that `make test` leaves out
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/conformance/sdks.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/cookbook/fetch.sh
	$(BIN)/python -m pytest -n 5 --dist loadscope --no-loadscope-reorder -m variants $(ARGS)

coverage: $(INSTALLED) ## List the lines that the unit tests do not run
	$(BIN)/coverage run -m pytest -n 0 $(ARGS) tests/unit
	$(BIN)/coverage report --skip-covered --show-missing

test-cookbook: $(INSTALLED) ## Run programs of tinker_cookbook, unmodified, against a live server
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/cookbook/fetch.sh
	$(BIN)/python -m pytest -m "" $(ARGS) tests/cookbook

test-compose: $(INSTALLED) ## Build the containers, train through them, kill and restart them
	$(BIN)/python -m pytest -m compose $(ARGS) tests/acceptance

test-browser: $(VENV)/.browser-installed ## Test the web pages in Chromium (apt-get install chromium; 160 MB more)
	$(BIN)/python -m pytest -m "" $(ARGS) tests/browser

dashboard-pictures: $(VENV)/.browser-installed ## Regenerate the dashboard's pictures in the docs, with the same Chromium
	PICTURES=docs/pictures $(BIN)/python -m pytest -m browser -k pictures tests/browser

$(VENV)/.browser-installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --require-hashes --constraint pins/hashes.txt --group browser
	@touch $@

test-chart: $(VENV)/.chart-installed ## Render the Helm chart, and check every object by the schemas of Kubernetes (350 MB more)
	$(BIN)/python -m pytest -n 0 -m chart $(ARGS) tests/chart

$(VENV)/.chart-installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --require-hashes --constraint pins/hashes.txt --group chart
	@touch $@

# Triton 3.6 interprets no kernel with numpy 2.4 or later, so an older numpy comes first there. The repository's settings name
# plugins that such a machine lacks.
test-kernels: $(if $(IS_GPU),$(GPU_VENV)/.installed,$(VENV)/.kernels-installed) ## Run the engine's GPU kernels in Triton's interpreter, on the CPU (690 MB more; VERSIONS=gpu: 5 GB)
	TRITON_INTERPRET=1 $(if $(IS_GPU),PYTHONPATH=$(GPU_VENV)/interpreter:.:workers:scheduler $(GPU_VENV)/bin/python -W ignore -m pytest -c /dev/null --rootdir . --noconftest -p no:cacheprovider,$(BIN)/python -m pytest) -n 2 $(ARGS) \
	  tests/unit/workers/engine/lora/fused tests/unit/workers/engine/decoding/test_page_kernel.py \
	  tests/unit/workers/engine/decoding/test_lora_kernel.py \
	  tests/unit/workers/engine/decoding/test_step_experts.py

$(VENV)/.kernels-installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --require-hashes --constraint pins/hashes.txt --group kernels
	@touch $@

test-gpu: $(INSTALLED) ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

rehearse-gpu: $(if $(IS_GPU),$(GPU_VENV)/.installed,$(INSTALLED)) ## Run every script for a GPU on this CPU, with a tiny model (VERSIONS=gpu: with a GPU machine's versions)
	PYTHON=$(if $(IS_GPU),$(GPU_VENV),$(VENV))/bin/python bench/gpu_all.sh rehearse $(or $(OUT),/tmp/cotrain-rehearsal)

$(GPU_VENV)/.installed: pins/gpu-machine.txt
	$(PYTHON_3_12) -m venv --clear $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --no-compile --requirement pins/gpu-machine.txt
	$(GPU_VENV)/bin/python -m pip install --quiet --no-compile --target $(GPU_VENV)/interpreter "numpy<2.4"
	@touch $@

test-faults: $(INSTALLED) ## Kill a real server's processes at every failpoint, and at random
	$(BIN)/python -m pytest -m "not mutants and not soak" $(ARGS) tests/faults

soak: $(INSTALLED) ## Kill a server's processes at random for minutes: ARGS="--minutes 10 --seed 7"
	$(BIN)/python -m tests.faults.soak $(ARGS)

mutants: $(INSTALLED) ## Check that the fault suite detects each of the deliberate defects
	$(BIN)/python -m pytest -m mutants -rP $(ARGS) tests/faults

compatibility: $(INSTALLED) ## Measure every published SDK version and other programs, and write docs/reference/compatibility.md
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/conformance/sdks.sh all
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/conformance/programs/install.sh
	$(BIN)/python -m tests.conformance.scoreboard

lint: $(INSTALLED) ## Check style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## Fix and format the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pictures: $(INSTALLED) ## Regenerate the guide's pictures (needs an idle machine)
	$(BIN)/python examples/clock_cycles.py --picture docs/guide/pictures/clock-metronome.png
	$(BIN)/python examples/clock_cycles.py --mode eager --prepare-s 0.03 --picture docs/guide/pictures/clock-eager.png

docs: $(VENV)/.docs-installed ## Build the documentation site into site/ (60 MB more)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir site $(ARGS)

$(VENV)/.docs-installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --require-hashes --constraint pins/hashes.txt --group docs
	@touch $@

pages: $(INSTALLED) ## Write the rows of docs/reference/metrics.md from the code
	$(BIN)/python docs/tables.py

models: $(INSTALLED) ## Measure every family of models, and write the table of docs/reference/models.md
	$(BIN)/python docs/models.py

proto: ## Generate the wire messages from wire.proto
	PYTHON=$(PYTHON) client/cotrain/wire/proto/generate.sh

bench: $(INSTALLED) ## Measure the server against one tenant alone and against PEFT
	$(BIN)/python -m bench through_http $(ARGS)

bench-engine: $(INSTALLED) ## Measure the engine without a server: many tenants, one tenant, PEFT, the roofline
	$(BIN)/python -m bench engine $(or $(ARGS),--device cpu --threads 2)

up: ## Build and start the containers (GPU=1 for a GPU)
	$(COMPOSE) $(COMPOSE_FILES) up --build --detach

down: ## Stop the containers and keep their volumes
	$(COMPOSE) $(COMPOSE_FILES) down

clean: ## Remove files left by builds, tests and the demo
	rm -rf build dist .demo .sdk .make site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find client scheduler server workers tests bench examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove .venv as well
	rm -rf $(VENV) $(GPU_VENV)
