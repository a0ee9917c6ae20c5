PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-night test-torch test-accelerator test-gpu test-quiet test-hosts test-scripts test-wheel soak test-frameworks test-engines test-horovod test-xla mutants check bench pictures outputs docs test-docs wheel clean
# Two installs into one .venv must not run at once.
.NOTPARALLEL:

help:
	@echo 'make demo    run the demo'
	@echo 'make test    run the tests of join and joinables, JOBS=3 at once: minutes, for each change'
	@echo 'make test-all  run more cases of them, and the tests of the parts below: what CI runs'
	@echo 'make test-night  run all cases, and all scripts as their users do (hours)'
	@echo 'make test-torch TORCH=2.8.0  run the tests with another torch, which goes to .venv-torch-2.8.0 (gigabytes)'
	@echo 'make test-accelerator  run the tests of accelerators on a simulated one'
	@echo 'make test-gpu  run them on GPUs, of which one is enough, with NCCL and gloo; fails where torch finds none'
	@echo 'make test-quiet  run the tests that look at times, one by one; nothing else may run beside them'
	@echo 'make test-hosts  run the tests on two simulated hosts'
	@echo 'make test-scripts  run the tutorials, recipes, notebooks, projects and the demo'
	@echo 'make test-wheel  build and install the sdist and the wheel, and run the tests of them'
	@echo 'make soak    SOAK=500 random models and loops (make test: four), and all ways to fail'
	@echo 'make mutants one change of the logic after the other, each of which a test has to notice (for the night)'
	@echo 'make check   ruff (lint and format), pyright, and a look for sentences that have to be read twice'
	@echo 'make bench   run the benchmarks'
	@echo 'make docs    write the documentation to docs-out'
	@echo 'make test-docs opens each page of it in a headless browser, which npm installs into .venv-docs (minutes, once)'
	@echo 'make wheel   build the sdist and the wheel, to dist'
	@echo 'make pictures draws what the documentation shows, from runs'
	@echo 'make outputs runs the scripts that the documentation shows, and keeps what they print'
	@echo 'make clean   remove caches, build output, demo-out and docs-out (keeps .venv)'
	@echo 'All of these create .venv when it is missing; PYTHON=... picks the interpreter.'
	@echo 'make test-frameworks runs the tests inside training frameworks, in .venv-frameworks (minutes, once);'
	@echo '             FRAMEWORKS=old: with those of a year ago, in .venv-frameworks-old'
	@echo 'make test-engines runs the tests of engines, DeepSpeed included, in .venv-engines (minutes, once).'
	@echo 'make test-horovod builds Horovod into .venv-horovod (minutes, once), and trains under horovodrun.'
	@echo 'make test-xla runs the tests of collectives over PyTorch/XLA on the CPU, in .venv-xla (gigabytes, once).'

demo: .venv/.demo-installed
	$(BIN)/python -m demo

# Tests also wait, so there are more of them at once than processors; still more would burn CPU time while they wait.
JOBS ?= 3
# Or each of the processes that tests start would compile all code anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --max-worker-restart=0

# Tests that most changes leave alone: make test leaves them to make test-all, and to targets of their own.
HOSTS := tests/two_hosts
SCRIPTS := tests/test_scripts.py tests/test_notebook.py tests/projects
WHEEL := tests/test_wheel.py tests/test_package.py
SITE := tests/docs
INTEGRATIONS := tests/integrations tests/joinables/metrics
PARTS := tests/accelerator tests/engines $(HOSTS) $(SCRIPTS) $(WHEEL) $(SITE) $(INTEGRATIONS)

test: .venv/.test-installed
	$(PYTEST) $(addprefix --ignore=,$(PARTS))

test-all: .venv/.test-installed
	TESTS=all $(PYTEST)

test-night: .venv/.test-installed
	TESTS=night $(PYTEST) -o faulthandler_timeout=0

test-quiet: .venv/.test-installed
	QUIET=1 TESTS=all $(BIN)/python -m pytest -m in_quiet

test-hosts: .venv/.test-installed
	TESTS=all $(BIN)/python -m pytest $(HOSTS)

test-scripts: .venv/.test-installed
	TESTS=all $(PYTEST) $(SCRIPTS)

test-wheel: .venv/.test-installed
	TESTS=all $(PYTEST) $(WHEEL)

TORCH ?= 2.8.0
test-torch: .venv-torch-$(TORCH)/.installed
	TESTS=all .venv-torch-$(TORCH)/bin/python -m pytest -n $(JOBS)

test-accelerator: .venv/.test-installed
	TESTS=all $(BIN)/python -m pytest tests/accelerator

# Else all tests would be skipped where torch finds no GPU, and that would pass.
test-gpu: .venv/.test-installed
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU here: nothing was tested")'
	TESTS=gpu $(BIN)/python -m pytest tests/accelerator -k cuda

SOAK ?= 500
soak: .venv/.test-installed
	SOAK=$(SOAK) TESTS=all $(PYTEST) -o faulthandler_timeout=0 tests/joinables/test_random.py tests/joinables/test_random_blocks.py
	TESTS=night $(BIN)/python -m pytest tests/join/failure/test_ends.py

# FRAMEWORKS=old: releases of the autumn of 2025, about the oldest that are supported (tests/integrations/old.txt).
FRAMEWORKS :=
# The extras of the frameworks that tests/integrations runs in, and packages that need none.
EXTRAS := lightning,accelerate,transformers
OTHERS := trl sentence-transformers pytorch-ignite pytorch-lightning mmengine speechbrain
test-frameworks: .venv-frameworks$(FRAMEWORKS:%=-%)/.installed
	TESTS=all $(<D)/bin/python -m pytest -n $(JOBS) $(INTEGRATIONS) tests/test_house.py

# DeepSpeed compiles an extension when it is first used, with ninja and a C++ compiler.
test-engines: .venv-engines/.installed
	TESTS=all .venv-engines/bin/python -m pytest -n $(JOBS) tests/engines

ENDS := fails times_out fails_while_others_wait fails_in_a_fit
test-horovod: .venv-horovod/.installed
	for ranks in 2 4; do for end in "" $(ENDS); do PATH=$$PWD/.venv-horovod/bin:$$PATH horovodrun --gloo -np $$ranks python -W error -m tests.horovod.run $$end || exit 1; done; done

# Two ranks of the CPU are threads, each with a device. XLA ends their process 10 s after a rank has failed. The trainer
# refuses threads. It trains on two processes, between which gloo carries what XLA would.
test-xla: .venv-xla/.installed
	.venv-xla/bin/python -m tests.xla.run 1
	for end in "" fails times_out processes; do .venv-xla/bin/python -m tests.xla.run 2 $$end || exit 1; done

mutants: .venv/.test-installed
	$(BIN)/python -m tests.mutants

check: .venv/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright -p tests
	$(BIN)/python -m docs.prose

bench: .venv/.demo-installed
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/doors.py
	$(BIN)/python benchmarks/tensors.py

pictures: .venv/.demo-installed
	$(BIN)/python -m docs.order
	$(BIN)/python -m docs.timeline
	$(BIN)/python -m docs.two_ranks
	$(BIN)/python -m docs.choosing

outputs: .venv/.test-installed
	$(BIN)/python -m docs.outputs

docs: .venv/.docs-installed
	$(BIN)/python -m docs.errors
	$(BIN)/python -m docs.tables
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test-docs: .venv/.test-installed .venv/.docs-installed .venv-docs/.installed
	TESTS=all $(BIN)/python -m pytest $(SITE)

wheel: .venv/.test-installed
	$(BIN)/python -m build

clean:
	rm -rf build dist demo-out docs-out .hypothesis .pytest_cache .ruff_cache
	find . \( -path './.venv*' -o -path ./.git \) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# Groups of packages need a pip that has --group.
PIP := pip>=25.1
.venv/.%-installed: setup.cfg pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install -c constraints.txt '$(PIP)'
	$(BIN)/python -m pip install -c constraints.txt -e . --group $*
	@touch $@

# The compiled part of torchaudio needs CUDA. SpeechBrain imports torchaudio, and the tests do not need that part.
.venv-frameworks/.installed: setup.cfg pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -c constraints.txt '$(PIP)'
	$(@D)/bin/python -m pip install -c constraints.txt -e '.[$(EXTRAS),ray]' $(OTHERS) --group test
	rm -rf $(@D)/lib/python3*/site-packages/torchaudio/lib
	@touch $@

# Without Ray, whose releases of that time are not supported.
.venv-frameworks-%/.installed: setup.cfg pyproject.toml constraints.txt tests/integrations/%.txt Makefile
	$(PYTHON) -m venv $(@D)
	awk -F == '!seen[$$1]++' tests/integrations/$*.txt constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt '$(PIP)'
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt -e '.[$(EXTRAS)]' $(OTHERS) --group test
	rm -rf $(@D)/lib/python3*/site-packages/torchaudio/lib
	@touch $@

.venv-engines/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install -c constraints.txt '$(PIP)'
	.venv-engines/bin/python -m pip install -c constraints.txt -e '.[deepspeed]' --group test
	@touch $@

.venv-horovod/.installed: tests/horovod/build.sh tests/horovod/cxx setup.cfg constraints.txt
	tests/horovod/build.sh $(PYTHON) .venv-horovod
	@touch $@

# PyTorch/XLA has a release for each release of torch, up to 2.9.
.venv-xla/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(@D)
	sed '/^torch==/d' constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt -e . pytest numpy torch==2.9.0 torch_xla==2.9.0
	@touch $@

.venv-docs/.installed: tests/docs/package.json
	mkdir -p .venv-docs
	cp tests/docs/package.json .venv-docs
	npm install --prefix .venv-docs --ignore-scripts --no-audit --no-fund
	@touch $@

.venv-torch-%/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(@D)
	sed 's/^torch==.*/torch==$*/' constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt '$(PIP)'
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt -e . --group test
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit("joinables needs Python 3.10 or newer, and $(PYTHON) is %d.%d: choose another with make PYTHON=..." % v if v < (3, 10) else 0)'
	$(PYTHON) -m venv .venv
