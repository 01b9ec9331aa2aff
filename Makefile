# Every verb sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUST_SOURCES := $(shell find src -name '*.rs') Cargo.toml Cargo.lock
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test test-rust test-python lint bench wheel clean develop

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.x"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: $(BIN)/python pyproject.toml
	$(PIP) install 'maturin>=1.16,<2' $$($(BIN)/python tools/extras.py demo test lint)
	@touch $@

$(VENV)/.built: $(VENV)/.tools $(RUST_SOURCES)
	VIRTUAL_ENV=$(abspath $(VENV)) PATH=$(abspath $(BIN)):$$PATH maturin develop --release --quiet
	@touch $@

develop: $(VENV)/.built ## build the extension into .venv, editable
