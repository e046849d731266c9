# A fresh machine needs Python 3.11 or newer with venv (Debian: python3-venv), make, and nothing else.
#
#   make lab        set up .venv, open JupyterLab on learn/INDEX.ipynb, beside copies of the pages that are yours
#                   (LAB_ARGS="--no-browser --port 9999" goes to JupyterLab)
#   make test       set up .venv, run what CI runs on a push: ruff, mypy, a draw of the tests, the notebooks
#                   against their outputs (tests/kits/tiers.py says how it is drawn)
#   make test-all   every test, of large matrices a sample, and every notebook: before a change is called done
#   make test-matrix  every case of every test, and every notebook
#   make test-versions   what a push runs, on each torch that is tested (docs/versions.md), each in a .venv of its own;
#                   test-2.11, test-2.14: one of them
#   make test-phantom   the tests of bytes on PyTorch's own CUDA allocator, on a device without kernels (refimpl/phantom),
#                   in .venv-phantom: PyTorch's build for CUDA without NVIDIA's libraries
#   make test-phantom-pages   every notebook there, with numbers from the CPU
#   make notebooks  set up .venv, run every notebook without a browser and write it to build/notebooks/
#   make gpu        no set-up, no network: with the machine's own python3, torch and GPU, run the benchmarks, the GPU
#                   tests and the notebooks; writes data/measurements/ and build/gpu/ (OUT=dir packs them there)
#                   ONLY=attention,zero   these steps alone: smoke, a benchmark's name, tests, notebooks
#
#   PYTHON=/path/to/python   which Python to use          CONSTRAINTS=file   other versions than those tested
#   WORKERS=                 the tests one by one, as on a machine with a GPU
#   VENV=folder              another environment than .venv

CONSTRAINTS ?= constraints.txt
# Two processes share the tests, file by file in this order: a file's fixtures are made once, a notebook has one kernel.
# Not where there is a GPU: its driver counts the bytes of all processes together.
WORKERS     ?= $(if $(wildcard /dev/nvidia0),,-n 2 --dist loadfile --no-loadscope-reorder)

# A checkout, and PYTHON, may lie in a folder whose name has spaces, quotes, any letters: a word for the shell.
QUOTED      = '$(subst ','\'',$(1))'

VENV       ?= .venv
ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV) has a space in it: name a folder without one)
endif
IN_VENV    := $(VENV)/bin/python
INSTALLED  := $(VENV)/.installed
UNFINISHED := $(VENV).unfinished
NOTEBOOKS  := $(sort $(wildcard notebooks/*.ipynb))

PYTHONS    := python3 python3.13 python3.12 python3.11
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
NAMED      := $(if $(PYTHON),$(call QUOTED,$(PYTHON)))
IS_NEW      = $(shell $(1) -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo yes)
FOUND       = $(if $(NAMED),$(if $(call IS_NEW,$(NAMED)),$(NAMED)),$(firstword $(foreach p,$(PYTHONS),$(if \
              $(call IS_NEW,$(p)),$(p)))))
TOO_OLD     = refimpl needs Python 3.11 or newer, but $(FIRST) $(ITS_VERSION); install one, or name one with make PYTHON=/path/to/python
FIRST       = $(or $(NAMED),$(firstword $(PYTHONS)))
ITS_VERSION = $(shell $(FIRST) -c 'import sys; print("is %d.%d.%d" % sys.version_info[:3])' 2>/dev/null || echo does not run)

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export JUPYTER_PREFER_ENV_PATH = 1
unexport MPLBACKEND
# Without compiled modules in __pycache__ each of some hundred processes compiles the package anew: half a second.
unexport PYTHONDONTWRITEBYTECODE
# Threads that wait give their core away: ranks share cores, and spinning slows all of them.
export OMP_WAIT_POLICY = passive

.PHONY: help lab test test-all test-matrix test-versions test-2.11 test-2.14 test-phantom test-phantom-pages \
        phantom-venv notebooks gpu again
help:
	@sed -n 's/^#   //p' Makefile

lab: $(INSTALLED)
	@$(IN_VENV) tools/learn.py --out learn $(NOTEBOOKS)
	@$(IN_VENV) tools/start_page.py learn
	@$(IN_VENV) tools/lab.py learn $(LAB_ARGS)

NBVAL  := --nbval --nbval-current-env --nbval-cell-timeout=120
PYTEST  = $(IN_VENV) -m pytest $(WORKERS) $(NBVAL) tests $(NOTEBOOKS)
TIMES  := build/times.json

test: $(INSTALLED)
	$(IN_VENV) -m ruff check
	$(IN_VENV) -m mypy
	$(PYTEST) --tier push --times $(TIMES)
	$(IN_VENV) tools/times.py $(TIMES)

test-all test-matrix: test-%: $(INSTALLED)
	$(IN_VENV) -m ruff check
	$(IN_VENV) -m mypy
	$(PYTEST) --tier $* --times $(TIMES)
	$(IN_VENV) tools/times.py $(TIMES)

.NOTPARALLEL: test-versions
test-versions: test-2.11 test test-2.14
test-2.11 test-2.14: test-%:
	$(MAKE) test VENV=.venv-$* CONSTRAINTS=constraints-$*.txt TIMES=build/times-$*.json

# Operations on tensors of at most NUMBERS bytes have numbers in tests/gpu, whose bytes depend on counts.
PHANTOM = PYTHONPATH=tests/kits:$(call QUOTED,$(CURDIR)) .venv-phantom/bin/python -m pytest $(WORKERS) -p on_phantom
phantom-venv:
	$(MAKE) .venv-phantom/.installed VENV=.venv-phantom CONSTRAINTS=constraints-2.14.txt OVERRIDES=overrides-phantom.txt
# A guard's traced steps and a budget run in a mode of their own, beside none: and numbers are a mode.
GUARDED = tests/gpu/test_guard.py tests/gpu/test_budget.py
test-phantom: phantom-venv
	$(PHANTOM) -m "not bytes" tests/phantom/on_device
	NUMBERS=65536 $(PHANTOM) -m bytes tests/gpu --ignore tests/gpu/test_accumulation.py $(GUARDED:%=--ignore %)
	$(PHANTOM) -m bytes $(GUARDED)
	NUMBERS=262144 $(PHANTOM) -m bytes tests/gpu/test_accumulation.py tests/phantom/on_device
# One page tells what a dispatch mode changes, one opens the tracker late, beside none: and numbers are a mode. One runs
# on the CPU alone.
PLAIN = $(wildcard $(addprefix notebooks/*_,reading_the_meters.ipynb while_it_trains.ipynb which_attention_when.ipynb))
# Ranks that train with numbers from the CPU take longer than a cell has elsewhere. PyTorch 2.14's own operators in Triton
# (of torch.bmm) fail in Triton's interpreter.
test-phantom-pages: phantom-venv
	NUMBERS=268435456 TRITON_INTERPRET=1 TORCH_DISABLE_NATIVE_JIT=1 $(PHANTOM) $(NBVAL) --nbval-cell-timeout=400 $(filter-out $(PLAIN),$(NOTEBOOKS))
	$(PHANTOM) $(NBVAL) $(PLAIN)

notebooks: $(INSTALLED)
	$(IN_VENV) tools/notebooks.py --out build/notebooks $(NOTEBOOKS)

gpu:
	$(if $(FOUND),,$(error $(TOO_OLD)))
	$(FOUND) tools/gpu.py

# At its end the set-up writes which checkout was installed with which constraints. A set-up that was interrupted, copied
# from elsewhere or made with other constraints is therefore done again, and one whose torch was replaced by hand; an
# interrupted one in an empty .venv, since pip cannot tell a package that it half wrote from a whole one. Only a folder
# that make itself has made is emptied: it has the file .made.
PINNED    = $(if $(CONSTRAINTS),$(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' $(CONSTRAINTS) 2>/dev/null))
ITS_TORCH = $(shell $(IN_VENV) -c 'from importlib.metadata import version; print(version("torch").split("+")[0])' 2>/dev/null)
# pip's own settings say where torch comes from, and so which build it is. uv installs the rest, in a tenth of pip's time.
PIP = $(IN_VENV) -m pip install --no-compile $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
UV  = $(VENV)/bin/uv pip install --python $(IN_VENV) $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# What is not to be installed uv alone knows how to leave out.
INSTALL = $(if $(OVERRIDES),$(PIP) uv && $(UV) --override $(OVERRIDES) torch torchvision -e '.[dev]',\
          $(PIP) torch torchvision uv && { $(UV) -e '.[dev]' || $(PIP) -e '.[dev]'; })
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR) $(CONSTRAINTS))
$(INSTALLED): again
else ifneq ($(PINNED),$(if $(PINNED),$(ITS_TORCH)))
WHY := $(VENV) has torch $(ITS_TORCH), $(CONSTRAINTS) names $(PINNED): it is set up again. To keep another torch: CONSTRAINTS=
$(INSTALLED): again
endif
$(CONSTRAINTS):
	$(error CONSTRAINTS=$@: there is no such file)
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(if $(FOUND),,$(error $(TOO_OLD)))
	@$(if $(WHY),echo "$(WHY)",:)
	@rm -f $@
	@{ test ! -e $(VENV)/.made -o ! -e $(UNFINISHED) && $(IN_VENV) -c '$(NEW_ENOUGH)' 2>/dev/null; } || \
	{ test -e $(VENV)/.made || rmdir $(VENV) 2>/dev/null || test ! -e $(VENV) || \
	  { echo "$(VENV) is there, and no environment that make has made: name another folder with VENV="; false; } && \
	  echo "setting up $(VENV) with $(FOUND): a minute or more the first time" && touch $(UNFINISHED) && \
	  $(FOUND) -m venv --clear $(VENV) && touch $(VENV)/.made; }
	@touch $(UNFINISHED)
	@{ $(INSTALL); } || \
	{ echo "the set-up of $(VENV) did not end: see the words above. Without a network pip finds no package: give it one, or a"; \
	  echo "folder of wheels (PIP_NO_INDEX=1 PIP_FIND_LINKS=folder), and run make again. It begins anew."; exit 1; }
	@$(IN_VENV) tools/fit.py
	@printf '%s\n' $(call QUOTED,$(CURDIR) $(CONSTRAINTS)) >$@
	@rm $(UNFINISHED)
