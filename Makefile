SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PROTOS := $(wildcard protos/lenspair/*/v1/*.proto)
CODE := shared encoder_service decoder_service lenspair_client demo bench tests hatch_build.py
CHECKPOINT ?= demo/checkpoint
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Several torch processes share the cores here: their threads must not spin for long (see shared/cpu.py).
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 100000

.DEFAULT_GOAL := help
.PHONY: help setup lock proto demo up ask test check format lint types imports check-proto check-unit \
	verify verify-generated bench-smoke bench-encoder bench-decoder bench-pressure bench-store test-faults train evaluate clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

##### Set up

setup: $(VENV)/.ready shared/pb/.generated  ## Make .venv with the locked packages, and the generated code

$(VENV)/.ready: requirements.lock pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	$(VENV)/bin/uv pip install --python $(PY) --require-hashes --requirement requirements.lock
	$(VENV)/bin/uv pip install --python $(PY) --no-deps --no-build-isolation --editable .
	touch $@

lock: $(VENV)/.ready  ## Write requirements.lock anew from pyproject.toml
	$(VENV)/bin/uv pip compile pyproject.toml --extra server --group dev --universal \
	  --no-emit-index-url --no-annotate --generate-hashes --custom-compile-command "make lock" \
	  --quiet --output-file requirements.lock

proto: shared/pb/.generated  ## Generate Python code from the contracts

# The virtual path makes imports land under shared.pb, as long as no contract imports another one.
PROTOC = $(PY) -m grpc_tools.protoc -Ishared/pb=protos --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS:protos/%=shared/pb/%)

shared/pb/.generated: $(PROTOS) requirements.lock | $(VENV)/.ready
	rm -rf shared/pb && mkdir -p shared/pb
	$(call PROTOC,.)
	touch $@

##### Run

demo: setup  ## Start everything, ask about the sample pictures, check the answers
	$(PY) -m demo

up: setup  ## Start a store and both services and keep them running (CHECKPOINT=dir)
	$(PY) -m demo.up --checkpoint $(CHECKPOINT)

# The values reach the shell as variables, so that a question may hold quotes and dollar signs.
ask: export ASK_IMAGE = $(value IMAGE)
ask: export ASK_QUESTION = $(value Q)
ask: setup  ## Ask the running pair: make ask IMAGE=picture.png Q="What is this?"
	@lenspair ask $${ASK_IMAGE:+--image "$$ASK_IMAGE"} "$$ASK_QUESTION"

##### Check

test: setup  ## Run all tests
	$(PY) -m pytest tests

check: setup format lint types imports check-proto check-unit  ## Everything that must be clean; changes nothing

format:
	ruff format --check $(CODE)

lint:
	ruff check $(CODE)
	buf lint
	buf format --diff --exit-code

types:
	mypy

imports:
	lint-imports

check-proto: setup
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call PROTOC,$$fresh) \
	  && diff -r --exclude=.generated --exclude=__pycache__ shared/pb "$$fresh/shared/pb" \
	  && echo "generated code is fresh"

check-unit: setup
	$(PY) -m pytest tests/unit

verify: setup  ## Compare the pair with Transformers on the pixels, token for token (CHECKPOINT=dir)
	$(PY) -m bench.verify --checkpoint $(CHECKPOINT)

verify-generated: setup  ## The same on generated checkpoints: dense, untied, MoE in both layouts
	$(PY) -m bench.verify --generated

bench-smoke: setup  ## How much encoder and decoder slow each other on this machine
	$(PY) -m bench.smoke

bench-encoder: setup  ## The vision tower beside Transformers', and a known picture beside an empty call
	$(PY) -m bench.encoder

bench-decoder: setup  ## The engine beside Transformers' generate: prefill, decode, mixed lengths, reuse
	$(PY) -m bench.decoder

bench-pressure: setup  ## Neighbours' latency while callers cut, stop reading, overrun; who stays, what leaks
	$(PY) -m bench.pressure

bench-store: setup  ## The store beside a bare socket and redis-py, and what narrower features lose
	$(PY) -m bench.store

test-faults: setup  ## Kill, stop, fill and cut everything under steady load; nothing may be lost or wrong
	$(PY) -m bench.faults

train: setup  ## Train the demonstration checkpoint (about two hours)
	$(PY) -m demo.train

evaluate: setup  ## Accuracy of the demonstration checkpoint by kind of question
	$(PY) -m demo.evaluate

clean:  ## Remove what the targets made, but not the environment
	rm -rf .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache shared/pb
