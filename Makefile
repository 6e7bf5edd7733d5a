# `make` lists the targets. A fresh machine needs Python 3.11 or newer and make, nothing else.

# The first of these that is installed makes the environment.
PYTHON ?= python3.12 python3.13 python3.11 python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# How many tests run at the same time: each starts processes of its own, and most of them wait for one another.
WORKERS ?= 5
# What `make matrix` tests: versions of Python, as commands, each with one of JAX.
MATRIX ?= python3.11:0.10.2 python3.12:0.11.2 python3.13:0.12.0.1
# The tests of everything that touches JAX.
MATRIX_TESTS := tests/client tests/pipelines tests/session tests/ifrt tests/worker tests/end_to_end
# The modules that write pages from the code. That of licenses is left out, because it reads what is installed.
GENERATED_PAGES = $(filter-out licenses_page,$(patsubst docs/%.py,%,$(wildcard docs/*_page.py)))
# More arguments for the tool behind a target, for example: make test ARGS="-k cli -x"
ARGS ?=

# Processes start by the hundred: where the environment forbids bytecode, each would compile anew what it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test full quick thorough restarts machines runbook slurm kubernetes tensorflow pipelines ray matrix check pages docs bench compare conformance soak hostile release-check image imagelock protos clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## Train a small GPT on the 8 devices of an embedded cluster
	JAX_PLATFORMS=atoll $(BIN)/python examples/gpt.py $(ARGS)

test: $(VENV)/.test  ## Run the test suite, or a part of it: make test ARGS=tests/wire
	$(BIN)/python -m pytest --processes $(WORKERS) $(ARGS)

full: $(VENV)/.test  ## Run the suite with the long tests that `make test` leaves out
	$(BIN)/python -m pytest --full --processes $(WORKERS) $(ARGS)

quick: $(VENV)/.test  ## Run the tests that start no cluster: two minutes
	$(BIN)/python -m pytest --processes $(WORKERS) \
	  -m "not cluster and not slow and not hypothesis" $(addprefix --ignore=tests/,end_to_end examples machines) $(ARGS)

thorough: $(VENV)/.test  ## Run for long what the suite runs for short, or not at all: tests of properties, mixes of clients
	ATOLL_TEST_THOROUGHNESS=20 ATOLL_ORDER_SECONDS=60 $(BIN)/python -m pytest -m "hypothesis or thorough" --timeout 3600 --processes $(WORKERS) $(ARGS)
	ATOLL_ORDER_SECONDS=60 ATOLL_TEST_USAGE_SECONDS=600 ATOLL_TEST_MESSAGES=100000 \
	  $(BIN)/python -m pytest --timeout 3600 tests/end_to_end/test_order_end_to_end.py tests/operate/test_usage_command.py tests/controller/test_roles.py $(ARGS)
	ATOLL_TEST_FUZZED_MESSAGES=1000000 ATOLL_TEST_FUZZED_FRAMES=100000 \
	  $(BIN)/python -m pytest --timeout 7200 -s tests/end_to_end/test_fuzzed_control.py tests/grpc/http2/test_long_fuzz.py $(ARGS)
	ATOLL_TEST_ISLAND_COLLECTIVES=30000 $(BIN)/python -m pytest --timeout 3600 -s tests/end_to_end/test_order_over_islands.py $(ARGS)
	ATOLL_TEST_THOROUGHNESS=20 ATOLL_TEST_READ_SECONDS=600 $(BIN)/python -m pytest --timeout 3600 -s tests/end_to_end/test_reads_under_faults.py $(ARGS)
	ATOLL_TEST_MOVE_MIB=8192 $(BIN)/python -m pytest --timeout 3600 -s -rs tests/end_to_end/test_large_moves.py $(ARGS)

restarts: $(VENV)/.test  ## Kill the controller a hundred times, have standbys take over, and inject faults into a training, which takes long
	ATOLL_TEST_RESTARTS=100 ATOLL_TEST_TAKEOVERS=20 ATOLL_TEST_FAULT_STEPS=500 ATOLL_TEST_FAULT_SECONDS=10 \
	  $(BIN)/python -m pytest --timeout 3600 -s tests/end_to_end/test_restarts.py tests/end_to_end/test_standbys.py \
	  tests/end_to_end/test_injected_faults.py tests/operate/test_standby_command.py $(ARGS)

machines: $(VENV)/.test  ## Run the tests on several "machines" (as root), which take long
	ATOLL_TEST_MACHINES=1 $(BIN)/python -m pytest tests/machines tests/end_to_end/test_relays_end_to_end.py tests/operate/test_cluster_file_of_commands.py $(ARGS)

runbook: $(VENV)/.test  ## Inject the fault of each section of the runbook, and follow the section: five minutes
	ATOLL_TEST_RUNBOOK=1 $(BIN)/python -m pytest tests/operate/test_runbook.py $(ARGS)

slurm: $(VENV)/.test  ## Run what `atoll slurm` prints by Slurm, on several "machines" (as root, with slurm-wlm and munge)
	ATOLL_TEST_SLURM=1 $(BIN)/python -m pytest tests/machines/test_slurm_jobs.py $(ARGS)

kubernetes: $(VENV)/.test  ## Apply what `atoll kubernetes` prints to a real API server, and replace controllers by its Lease (as root, with etcd and KUBE_APISERVER)
	ATOLL_TEST_KUBERNETES=1 unshare --mount sh -c 'mount -t tmpfs tmpfs /run && exec $(BIN)/python -m pytest -s -rs tests/manifests/test_api_server.py $(ARGS)'

tensorflow: $(VENV)/.test $(VENV)/.tensorflow  ## Run the tests of the front end for TensorFlow, which is 1.4 GB to install
	ATOLL_TEST_TENSORFLOW=1 $(BIN)/python -m pytest --processes $(WORKERS) tests/tensorflow tests/examples/test_tensorflow_transformer.py $(ARGS)

pipelines: $(VENV)/.test  ## Twenty steps of three libraries' models in all schedules over 1, 2 and 4 islands, which takes long
	ATOLL_TEST_PIPELINES=1 $(BIN)/python -m pytest tests/end_to_end/pipelines $(ARGS)

ray: $(VENV)/.test $(VENV)/.ray  ## Run the tests of clusters on Ray, over several "machines" (as root): ten minutes
	ATOLL_TEST_RAY=1 $(BIN)/python -m pytest tests/machines/test_ray.py tests/machines/test_demo.py tests/engines/ray $(ARGS)

matrix:  ## Run the tests of what touches JAX with other versions: make matrix MATRIX="python3.12:0.12.0.1"
	@for each in $(MATRIX); do \
	  venv=$(VENV)-$$(echo $$each | tr : -); jax=$${each#*:}; \
	  $(MAKE) --no-print-directory PYTHON=$${each%:*} VENV=$$venv $$venv/.test || exit; \
	  $$venv/bin/python -m pip install --quiet --disable-pip-version-check "jax==$$jax" "jaxlib==$$jax" || exit; \
	  echo "JAX $$jax, $$($$venv/bin/python --version)"; \
	  $$venv/bin/python -m pytest --quiet --processes $(WORKERS) $(MATRIX_TESTS) $(ARGS) || exit; \
	done

check: $(VENV)/.test  ## Check style, types, and rules of the sources: layers, names, handlers of exceptions, prose
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_tidy.py tests/test_late_binding.py tests/test_handlers.py \
	  tests/test_retries.py tests/test_decodable.py tests/test_atomic_files.py tests/test_text_logic.py
	$(BIN)/python -m tests.sizes

pages: $(VENV)/.test  ## Write the pages of docs/reference that are generated from the code
	for each in $(GENERATED_PAGES); do $(BIN)/python -m docs.$$each || exit; done

docs: $(VENV)/.test  ## Run the examples of all pages, compare the pages with the code, and build the site in docs/_build/html
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python -m pytest -q --full --processes $(WORKERS) tests/docs tests/test_tidy.py -k "not test_the_site_builds" $(ARGS)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/.bench  ## Measure Atoll beside stock JAX: a table, and JSON in benchmarks/results/local
	$(BIN)/python -m benchmarks micro $(ARGS)

compare: $(VENV)/.bench  ## Measure the code here and that of other commits in turn: make compare BASE=main ARGS="--only a,b,z"
	@test -n "$(BASE)" || { echo "name the commit to compare with: make compare BASE=main" >&2; exit 2; }
	$(BIN)/python -m benchmarks compare $(addprefix --base ,$(BASE)) $(ARGS)

conformance: $(VENV)/.test $(VENV)/.conformance-requirements  ## Run JAX's own tests: make conformance JAX=<a JAX source checkout> ARGS="--suite more --shard 1/4"
	@test -n "$(JAX)" || { echo "say where JAX's sources are: make conformance JAX=<checkout at the installed version's tag>" >&2; exit 2; }
	$(BIN)/python -m scripts.conformance --jax "$(JAX)" $(ARGS)

soak: $(VENV)/.test  ## Random work while processes are killed, ten minutes; also machines and links (as root): make soak ARGS="--machines 3 --minutes 20"
	$(BIN)/python -m scripts.soak $(ARGS)

hostile: $(VENV)/.test  ## Train beside a tenant who attacks the cluster, for twelve minutes
	$(BIN)/python -m scripts.hostile $(ARGS)

release-check: $(VENV)/.release  ## Build the wheel and the sdist, and test them in an empty environment
	$(BIN)/python -m scripts.release_check

image: $(VENV)/.test  ## Build the image and run a cluster in it (as root, with podman and debootstrap)
	$(BIN)/python -m scripts.image_check $(ARGS)

imagelock:  ## Write the versions of the image's packages, with Python 3.12: docker/requirements.lock
	scripts/lock-image

protos: $(VENV)/.dev  ## Write the protocol's Python modules anew from the .proto files
	$(BIN)/python scripts/generate_protos.py

clean:  ## Remove the environment and all that tools have left
	rm -rf $(VENV) $(VENV)-* build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	python=$$(scripts/find-python $(PYTHON)) && $$python -m venv $(VENV)
	$(INSTALL) --upgrade pip  # Python 3.11's own takes twice as long to find what fits together

# What JAX's tests import beyond JAX.
$(VENV)/.conformance-requirements: scripts/conformance-requirements.txt | $(BIN)/python
	$(INSTALL) --requirement $<
	@touch $@

# One stamp an extra: installed once, and again when pyproject.toml changes. Bytecode is written of what is imported, when
# it is: that is a third of the packages' sources. Of what each process imports at its start it is written here.
$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(INSTALL) --no-compile --editable '.[$*]'
	@cd $(VENV)/lib/python*/site-packages && ../../../bin/python -m compileall -qq -j 0 -x /tests/ jax jaxlib numpy || true
	@touch $@
