# Every verb sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
RUST_SOURCES := $(shell find src -name '*.rs') $(wildcard kernels/ptx/*) build.rs Cargo.toml Cargo.lock

.DEFAULT_GOAL := help
.PHONY: help demo test test-rust test-python test-ptx ptx mutants lint bench wheel develop fuzz clean

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.built ## what is supported, every cache format packed and decoded, errors and a plot in demo-output/
	$(BIN)/sparse-mla demo --output demo-output

test: test-ptx test-rust test-python ## all tests

test-rust: ## Rust tests without and with features (the PTX is executed), documentation, package
	cargo test --quiet
	cargo test --quiet --all-features
	RUSTDOCFLAGS='-D warnings' cargo doc --quiet --no-deps --all-features
	cargo package --quiet --allow-dirty # dirty: a developer runs this before committing

test-python: $(VENV)/.built ## Python tests
	$(BIN)/pytest -q

test-ptx: .ptx/.installed ## committed PTX = compiled sources; it assembles for every target without spills
	$(BIN)/python kernels/check.py

ptx: .ptx/.installed ## compile the kernels to kernels/ptx
	$(BIN)/python kernels/check.py --write

mutants: ## seeded faults in the PTX, each caught by a test; prints the table
	cargo test --quiet --all-features --test ptx -- --ignored --exact --nocapture every_mutant_is_caught

lint: $(VENV)/.built ## formats, lints and types of both languages
	cargo fmt --check
	cargo clippy --quiet --all-features --all-targets -- -D warnings
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy --no-error-summary python examples tools kernels
	$(BIN)/basedpyright --level error python examples
	$(BIN)/python -m mypy.stubtest sparse_mla --ignore-missing-stub --mypy-config-file pyproject.toml

bench: $(VENV)/.built ## CPU timings against numpy, results in benches/results/
	$(BIN)/python benches/bench_cpu.py

fuzz: ## arbitrary bytes, strides and indices; FUZZ_CASES sets how many
	FUZZ_CASES=$${FUZZ_CASES:-20000} cargo test --quiet --test fuzz

wheel: $(VENV)/.tools ## the release wheel in dist/
	$(BIN)/maturin build --profile dist --out dist

develop: $(VENV)/.built ## build the extension into .venv, editable

clean: ## remove everything that was built
	rm -rf target dist demo-output .ptx $(VENV)
	find python -name '*.so' -delete

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

.ptx/.installed: $(BIN)/python kernels/requirements-compiler.txt kernels/requirements-floor.txt
	rm -rf .ptx
	$(PIP) install --no-deps --require-hashes --target .ptx/compiler -r kernels/requirements-compiler.txt
	$(PIP) install --no-deps --require-hashes --target .ptx/floor -r kernels/requirements-floor.txt
	@touch $@

$(VENV)/.tools: $(BIN)/python pyproject.toml tools/extras.py
	$(PIP) install 'maturin>=1.16,<2' $$($(BIN)/python tools/extras.py demo test lint)
	@touch $@

$(VENV)/.built: $(VENV)/.tools $(RUST_SOURCES)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release > $(VENV)/build.log 2>&1 || (cat $(VENV)/build.log; exit 1)
	@touch $@
