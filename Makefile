SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PROTOS := $(wildcard protos/lenspair/*/v1/*.proto)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup proto lock

help:  ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.ready proto  ## Make .venv with the locked packages, and the generated code

$(VENV)/.ready: requirements.lock
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	$(VENV)/bin/uv pip install --python $(PY) --require-hashes --requirement requirements.lock
	touch $@

lock: $(VENV)/.ready  ## Write requirements.lock anew from pyproject.toml
	$(VENV)/bin/uv pip compile pyproject.toml --extra server --group dev --universal \
	  --no-emit-index-url --no-annotate --generate-hashes --custom-compile-command "make lock" \
	  --quiet --output-file requirements.lock

proto: shared/pb/.generated  ## Generate Python code from the contracts

# The virtual path makes imports land under shared.pb, as long as no contract imports another one.
shared/pb/.generated: $(PROTOS) $(VENV)/.ready
	rm -rf shared/pb && mkdir -p shared/pb
	$(PY) -m grpc_tools.protoc -Ishared/pb=protos --python_out=. --grpc_python_out=. --mypy_out=quiet:. \
	  --mypy_grpc_out=quiet:. $(PROTOS:protos/%=shared/pb/%)
	touch $@
