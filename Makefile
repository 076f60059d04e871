# `make help` lists the targets. Every environment is made here, from the pinned versions in constraints/.

PYTHON ?= python3
VENV := .venv
LOWEST := .venv-lowest
INTEROP := .venv-interop
# loaders that exclude each other's versions of numpy, transformers or huggingface_hub: each has an environment of its own
LOADERS := megatron streaming litdata datatrove trl
# what `make benchmark-peers` compares besides; tokenizers 1.x alone, for peers that are to encode with it
PEERS := datasets grain lance guideloom bridge
PEER := .venv-peers
NEWER_TOKENIZERS := $(PEER)-tokenizers
# the newest release of these needs a newer Python, which their constraints name: '# Python 3.12'
NEWER_PYTHON := $(patsubst constraints/%.txt,.venv-%,$(shell grep -l '^. Python 3' constraints/*.txt))
NEEDED = $(shell sed -n 's/^. Python //p' constraints/$*.txt)
TRAINERS := .venv-trainers
REMOTE := .venv-remote
RAY := .venv-ray
BIN := $(VENV)/bin
# One pip, that of .venv, installs into the environment that the target lies in. What is imported is compiled then, once:
# most of torch never is, and compiling it takes as long as unpacking it.
PIP_INSTALL = $(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-compile
# All that a list names, and no more. The index of Python packages has torch for CUDA, which needs gigabytes of other
# packages, so torch comes first, from where there are builds for the CPU. Where they can't be had, it comes with all that.
PIP_INSTALL_LIST = ! torch=$$(grep ^torch== $(1)) || \
	$(PIP_INSTALL) --no-deps --retries 1 --index-url https://download.pytorch.org/whl/cpu $$torch || \
	{ echo "$(@D): no torch for the CPU from download.pytorch.org, so one from the index"; $(PIP_INSTALL) $$torch; }; \
	$(PIP_INSTALL) --no-deps --requirement $(1)
# compiles what the tests import, before several of their processes do it at once
COMPILE := -c 'import hypothesis, torch._dynamo, tokshard.cli.main, tokshard.trainer.loop'
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers often forbid it; then each of the hundreds of processes of the tests compiles torch again.
export PYTHONDONTWRITEBYTECODE :=

CODE := quickstart/shards/code
PROSE := quickstart/shards/prose
RECIPE := recipes/quickstart_train.toml
RUN := quickstart/run
# These files run again with the lowest versions, the first and the last case of each test. They use every package that
# tokshard needs: formats, compression, tokenizers, JSON and msgpack, templates, the command line, arrays.
LIBRARIES := $(addprefix tests/,format/test_arrow_file.py format/test_content.py format/test_documents.py \
	format/test_loss.py format/test_manifest.py format/test_partial_file.py \
	format/test_shards.py format/test_stride_hashes.py format/test_whole_corpus.py \
	contract/test_promise_02_builder.py contract/test_promise_02_round_trip.py \
	contract/test_promise_10_any_arrow_reader.py cli/test_build.py cli/test_main.py cli/test_plan.py \
	pipeline/encode/chat/test_template.py pipeline/test_readers.py \
	pipeline/test_records.py pipeline/test_saved.py pipeline/test_shared_values.py pipeline/test_streams.py \
	pipeline/test_tokenizer.py inspect/test_pages.py inspect/test_statistics.py cli/test_summary.py \
	interop/test_export.py run_files/test_plan_file.py run_files/test_recipe.py runtime/test_numpy_loader.py \
	runtime/test_vectors.py)
# `make test-long` runs all cases, and these files: they need torch, which takes as long to install as all the rest.
TORCH_LIBRARIES := $(addprefix tests/,contract/test_promise_05_random_access.py contract/test_promise_07_constant_state.py \
	runtime/test_loader.py runtime/test_loss_spans.py runtime/test_recycling.py trainer/test_hugging_face.py)
# of `make test-interop`, with other packages than the rest of it
BY_LOADERS := $(LOADERS:%=tests/interop/test_with_%.py)
BY_TRAINERS := $(wildcard tests/interop/test_cluster_*.py)
RESUME := checkpoint.load=$(RUN)/checkpoints/step-00000020 train.stop_after=30

.DELETE_ON_ERROR:
.PHONY: help quickstart check test test-pinned test-lowest test-long soak test-interop test-browser test-remote test-ray benchmark benchmark-peers lint format clean

help:
	@echo "make quickstart    real text of this machine becomes two corpora, is streamed, and trains a model"
	@echo "make check         lint, types and the fast tests of the rooms that differ from BASE=HEAD; a minute per room"
	@echo "make test          lint, types and the test suite, with the pinned and with the lowest versions; 6 minutes or so"
	@echo "make test-long     what 'make test' leaves out: long tests, and most cases of long tables; an hour or more"
	@echo "make test-interop  other projects' readers and training loops on tokshard's shards; the cluster recipes"
	@echo "make test-browser  the HTML reports in headless Chromium, if this machine has one"
	@echo "make test-remote   buckets, against a server that people run, on this machine"
	@echo "make test-ray      builds on a Ray cluster of three nodes on this machine"
	@echo "make soak          trials of kills, histories and damage, every day others; 15 minutes, or hours with LONG=1"
	@echo "make benchmark     where the time of a build goes and how fast plans are read, on this machine"
	@echo "make benchmark-peers  tokshard beside other builders and loaders; an hour or so; QUICK=1 or ONLY=chat only print"
	@echo "make lint          ruff and mypy"
	@echo "make format        ruff format, and the fixes that ruff is sure of"
	@echo "make clean         remove everything that make made"

quickstart: $(VENV)/stamp-run quickstart/raw/stamp
	$(BIN)/tokshard build quickstart/raw/code.jsonl.zst --tokenizer recipes/tokenizer --out $(CODE)
	$(BIN)/tokshard build quickstart/raw/prose.jsonl --tokenizer recipes/tokenizer --out $(PROSE)
	$(BIN)/tokshard verify $(CODE) $(PROSE)
	$(BIN)/tokshard inspect --sample 0 $(CODE) $(PROSE)
	$(BIN)/python recipes/quickstart_stream.py $(CODE) $(PROSE)
	rm -rf $(RUN) $(RUN)-on-1 $(RUN)-on-3
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m tokshard.trainer $(RECIPE)
	$(BIN)/python -m tokshard.trainer $(RECIPE) $(RESUME) train.out=$(RUN)-on-1
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 3 -m tokshard.trainer $(RECIPE) $(RESUME) train.out=$(RUN)-on-3
	$(BIN)/python recipes/quickstart_compare.py $(RECIPE) $(RUN) $(RUN)-on-1 $(RUN)-on-3

# new raw text makes the shards of the old text stale: both go
quickstart/raw/stamp: recipes/quickstart_corpus.py | $(VENV)/stamp-run
	rm -rf quickstart
	$(BIN)/python recipes/quickstart_corpus.py quickstart/raw
	@touch $@

# a file of tokshard/ROOM or tests/ROOM stands for the tests of that room
BASE ?= HEAD
ROOMS = $(shell { git diff --name-only $(BASE); git ls-files --others --exclude-standard; } | cut -d/ -f1,2 \
	| sed -n -E -e 's,^tokshard/run_files$$,tests/run_files tests/trainer,p' -e 's,^tokshard/interop$$,tests/interop tests/pipeline,p' \
	-e 's,^tokshard/[a-z]+\.py$$,tests/cli,p' -e 's,^(tokshard|tests)/([a-z_]+)$$,tests/\2,p' | sort -u)

check: lint
	$(BIN)/python -m pytest -q -n 2 tests/architecture $(wildcard $(ROOMS))

# One graph: the tests begin when their own environment is there, beside lint and what is left of the other environment.
# They wait for processes and signals a part of their time: three at a time keep two cores busy, and six were no faster.
test:
	$(MAKE) --jobs 3 --keep-going --output-sync=line test-pinned lint test-lowest

# The parts of the suite. Each is one process, without pytest-xdist: it collects only its own tests, and sends no results
# to another process. Importing torch takes two seconds of a process and makes its forks slower, so only two of the
# parts need it.
TESTS := $(BIN)/python -m pytest -m "not soak and not interop and not benchmark and not browser and not remote and not ray"
WITH_TORCH := benchmark/test_gpu_benchmark.py $(addprefix tests/,contract/test_promise_03_epoch.py \
	contract/test_promise_04_world.py contract/test_promise_05_random_access.py contract/test_promise_07_constant_state.py \
	contract/test_promise_12_loss.py inspect/test_bench.py inspect/test_steps_on_record.py run_files/test_saved_state.py)
# the longest first
PARTS := contract pipeline rest runtime trainer
trainer := tests/trainer $(WITH_TORCH)
runtime := tests/runtime
contract := tests/contract tests/readme
pipeline := tests/pipeline
rest := benchmark $(filter-out tests/__pycache__ $(trainer) $(runtime) $(contract) $(pipeline),$(patsubst %/,%,$(wildcard tests/*/)))

test-pinned: $(PARTS:%=test-part-%)

test-part-%: $(VENV)/stamp-dev
	$(TESTS) $(if $(filter-out trainer,$*),$(addprefix --ignore=,$(WITH_TORCH))) $($*)

test-long: $(VENV)/stamp-dev $(LOWEST)/stamp-torch
	$(LOWEST)/bin/python -m pytest -n 2 $(LIBRARIES) $(TORCH_LIBRARIES)
	$(BIN)/python -m pytest -n 2 --dist loadfile --timeout 1800 -m "soak and not remote and not ray"

test-lowest: $(LOWEST)/stamp-test
	$(LOWEST)/bin/python -m pytest --first-and-last $(LIBRARIES)

# Two processes, so that a trial that crashes its own is a trial that failed. The long form goes on with a Ray cluster, and
# ends with the long tests and new examples for every property. ONLY=kills tries one kind, ONLY=kills-3 one trial.
TRIALS := -m pytest --dist load $(if $(ONLY),-k '$(ONLY)') tests/soak
soak: $(VENV)/stamp-dev $(if $(LONG),$(RAY)/stamp-test)
	$(BIN)/python $(TRIALS) -n 2 --rounds $(if $(LONG),300,30) -m "soak and not ray"
	$(if $(LONG),$(RAY)/bin/python $(TRIALS) -n 1 --rounds 300 -m "soak and ray")
	$(if $(LONG),HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -n 2 --timeout 3600 --ignore tests/soak -m "soak or (hypothesis and not remote and not interop)")

test-interop: $(INTEROP)/stamp-test $(TRAINERS)/stamp-test $(LOADERS:%=$(INTEROP)-%/stamp-test)
	$(INTEROP)/bin/python -m pytest -n 2 -m interop $(addprefix --ignore=,$(BY_TRAINERS) $(BY_LOADERS))
	failed=; for loader in $(LOADERS); do \
		if [ -e $(INTEROP)-$$loader/failed.txt ]; then echo "test_with_$$loader.py: $$(cat $(INTEROP)-$$loader/failed.txt)"; \
		else $(INTEROP)-$$loader/bin/python -m pytest -m interop tests/interop/test_with_$$loader.py || failed=1; fi; done; \
		[ -z "$$failed" ]
	$(TRAINERS)/bin/python -m pytest -n 2 -m interop $(BY_TRAINERS) tests/interop/test_recipes.py

test-browser: $(VENV)/stamp-browser
	$(BIN)/python -m pytest -m browser

test-remote: $(REMOTE)/stamp-test
	$(REMOTE)/bin/python -m pytest -n 2 -m "remote and not ray" tests/store tests/pipeline

# one cluster at a time
test-ray: $(RAY)/stamp-test
	$(RAY)/bin/python -m pytest -m ray tests/pipeline/test_ray.py tests/contract/test_promise_01_product.py

benchmark: $(VENV)/stamp-dev
	$(BIN)/python -m benchmark.build
	$(BIN)/python -m benchmark.runtime

# It begins with a look at whether the pinned peers are the newest, and makes the environments of the sections alone.
# A peer that can't be installed has a row that says so, from the last line of failed.txt.
benchmark-peers: $(VENV)/stamp-dev
	$(BIN)/python -m benchmark.peers.newest $(ONLY)
	$(MAKE) $$($(BIN)/python -m benchmark.peers.environments $(ONLY))
	$(BIN)/python -m benchmark.peers $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

lint: $(VENV)/stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/stamp-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) $(LOWEST) $(INTEROP) $(LOADERS:%=$(INTEROP)-%) $(TRAINERS) $(REMOTE) $(RAY) \
		$(PEERS:%=$(PEER)-%) $(NEWER_TOKENIZERS) quickstart .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(VENV)/stamp-run: pyproject.toml constraints/default.txt | $(BIN)/python
	$(PIP_INSTALL) --constraint constraints/default.txt --editable '.[fast,torch,report]'
	@touch $@

$(VENV)/stamp-dev: pyproject.toml constraints/default.txt | $(BIN)/python
	$(PIP_INSTALL) --constraint constraints/default.txt --editable '.[fast,torch,dev]'
	$(BIN)/python $(COMPILE)
	@touch $@

$(VENV)/stamp-browser: pyproject.toml constraints/default.txt | $(BIN)/python
	$(PIP_INSTALL) --constraint constraints/default.txt --editable '.[fast,torch,dev,test-browser]'
	@touch $@

# transformers can't be installed together with tokenizers 1.x
$(INTEROP)/stamp-test: pyproject.toml constraints/interop.txt | $(INTEROP)/bin/python
	$(PIP_INSTALL) --constraint constraints/interop.txt --editable '.[test-interop]'
	@touch $@

# the trainers ask for other versions of click and datasets
$(TRAINERS)/stamp-test: pyproject.toml constraints/trainers.txt | $(TRAINERS)/bin/python
	$(PIP_INSTALL) --constraint constraints/trainers.txt --editable '.[test-trainers]'
	@touch $@

# their lists are complete; without its Python an environment has failed.txt alone, and is tried again next time
$(LOADERS:%=$(INTEROP)-%/stamp-test): $(INTEROP)-%/stamp-test: pyproject.toml constraints/interop-%.txt | $(INTEROP)-%/bin/python
	@test -e $(@D)/failed.txt || { $(call PIP_INSTALL_LIST,constraints/interop-$*.txt) --editable . && touch $@; }

$(PEERS:%=$(PEER)-%/stamp-peer): $(PEER)-%/stamp-peer: constraints/peers-%.txt | $(PEER)-%/bin/python
	@test ! -x $(@D)/bin/python || { rm -f $(@D)/failed.txt; touch $@; \
	{ $(call PIP_INSTALL_LIST,constraints/peers-$*.txt); } 2>$(@D)/pip.txt || mv $(@D)/pip.txt $(@D)/failed.txt; }

$(NEWER_TOKENIZERS)/stamp-peer: constraints/default.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) $$(grep ^tokenizers== constraints/default.txt)
	@touch $@

$(RAY)/stamp-test: pyproject.toml constraints/default.txt | $(RAY)/bin/python
	$(PIP_INSTALL) --constraint constraints/default.txt --editable '.[fast,test-ray]'
	@touch $@

$(REMOTE)/stamp-test: pyproject.toml constraints/default.txt | $(REMOTE)/bin/python
	$(PIP_INSTALL) --constraint constraints/default.txt --editable '.[fast,torch,test-remote]'
	@touch $@

$(LOWEST)/stamp-test: pyproject.toml constraints/lowest.txt | $(LOWEST)/bin/python
	$(PIP_INSTALL) --constraint constraints/lowest.txt --editable '.[test]'
	$(LOWEST)/bin/python -c 'import hypothesis, tokshard.cli.main'
	@touch $@

$(LOWEST)/stamp-torch: $(LOWEST)/stamp-test
	$(PIP_INSTALL) --constraint constraints/lowest.txt --editable '.[torch,test]'
	@touch $@

# making .venv takes 41 CPU-seconds with the pip of constraints/default.txt, 52 with the one that comes with Python 3.11
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$@ -m pip install --quiet --upgrade --constraint constraints/default.txt pip

$(NEWER_PYTHON:%=%/bin/python): .venv-%/bin/python: | $(BIN)/python
	@for each in $(PYTHON$(subst .,,$(NEEDED))) python$(NEEDED) $(HOME)/.pyenv/versions/$(NEEDED).*/bin/python; do \
		$$each -c 'import venv' 2>/dev/null && rm -rf .venv-$* && exec $$each -m venv --without-pip .venv-$*; done; \
	mkdir -p .venv-$*; echo "needs Python $(NEEDED), which is not here: install python$(NEEDED) and its venv, or give" \
		"PYTHON$(subst .,,$(NEEDED))=/path/to/python$(NEEDED)" | tee .venv-$*/failed.txt | sed 's,^,.venv-$*: ,'

$(LOWEST)/bin/python $(INTEROP)/bin/python $(TRAINERS)/bin/python $(REMOTE)/bin/python $(RAY)/bin/python \
$(filter-out $(NEWER_PYTHON:%=%/bin/python),$(LOADERS:%=$(INTEROP)-%/bin/python) $(PEERS:%=$(PEER)-%/bin/python)): | $(BIN)/python
	$(PYTHON) -m venv --without-pip $(patsubst %/bin/python,%,$@)
