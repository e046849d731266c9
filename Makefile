# A fresh machine needs Python 3.11 or newer, make, and nothing else.
#
#   make lab        set up .venv, open JupyterLab on learn/: copies of the pages, yours to answer and change
#                   (LAB_ARGS="--no-browser --port 9999" goes to JupyterLab)
#   make test       set up .venv, run everything that CI runs: ruff, the tests, every notebook against its outputs
#   make notebooks  set up .venv, run every notebook without a browser and write it to build/notebooks/
#   make gpu        no set-up, no network: with the machine's own python3, torch and GPU, run the benchmarks, the GPU
#                   tests and the notebooks; writes data/measurements/ and build/gpu/ (OUT=dir packs them there)
#                   ONLY=attention,zero   these steps alone: smoke, a benchmark's name, tests, notebooks
#
#   PYTHON=/path/to/python   which Python to use          CONSTRAINTS=file   other versions than those tested
#   WORKERS=                 the tests one by one, as on a machine with a GPU

PYTHON      ?= python3 python3.13 python3.12 python3.11
CONSTRAINTS ?= constraints.txt
# Two processes share the tests, file by file in this order: a file's fixtures are made once, a notebook has one kernel.
# Not where there is a GPU: its driver counts the bytes of all processes together.
WORKERS     ?= $(if $(wildcard /dev/nvidia0),,-n 2 --dist loadfile --no-loadscope-reorder)

VENV       := .venv
IN_VENV    := $(VENV)/bin/python
INSTALLED  := $(VENV)/.installed
UNFINISHED := $(VENV).unfinished
NOTEBOOKS  := $(sort $(wildcard notebooks/*.ipynb))

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
FOUND       = $(firstword $(foreach p,$(PYTHON),$(shell $(p) -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $(p))))
FIRST       = $(firstword $(PYTHON))
ITS_VERSION = $(shell $(FIRST) -c 'import sys; print("is %d.%d.%d" % sys.version_info[:3])' 2>/dev/null || echo does not run)

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export JUPYTER_PREFER_ENV_PATH = 1
unexport MPLBACKEND
# Without compiled modules in __pycache__ each of some hundred processes compiles the package anew: half a second.
unexport PYTHONDONTWRITEBYTECODE
# Threads that wait give their core away: ranks share cores, and spinning slows all of them.
export OMP_WAIT_POLICY = passive

.PHONY: help lab test notebooks gpu again
help:
	@sed -n 's/^#   //p' Makefile

lab: $(INSTALLED)
	$(IN_VENV) tools/learn.py --out learn $(NOTEBOOKS)
	$(IN_VENV) -m jupyterlab learn $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

test: $(INSTALLED)
	$(IN_VENV) -m ruff check
	$(if $(NOTEBOOKS),,@echo "no notebook is in notebooks/ yet: only the tests are run")
	$(IN_VENV) -m pytest $(WORKERS) --nbval --nbval-current-env --nbval-cell-timeout=120 tests $(NOTEBOOKS)

notebooks: $(INSTALLED)
	$(IN_VENV) tools/notebooks.py --out build/notebooks $(NOTEBOOKS)

gpu:
	$(FIRST) tools/gpu.py

# The last line of the set-up writes which checkout was installed with which constraints. A set-up that was interrupted,
# copied from elsewhere or made with other constraints is therefore done again; an interrupted one in an empty .venv,
# since pip cannot tell a package that it half wrote from a whole one.
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR) $(CONSTRAINTS))
$(INSTALLED): again
endif
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(if $(FOUND),,$(error refimpl needs Python 3.11 or newer, but $(FIRST) $(ITS_VERSION); install one, or name one with make PYTHON=/path/to/python))
	@rm -f $@
	@{ test ! -e $(UNFINISHED) && $(IN_VENV) -c '$(NEW_ENOUGH)' 2>/dev/null; } || \
	{ echo "setting up $(VENV) with $(FOUND): a few minutes the first time"; touch $(UNFINISHED); $(FOUND) -m venv --clear $(VENV); }
	@touch $(UNFINISHED)
	$(IN_VENV) -m pip install $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	@echo '$(CURDIR) $(CONSTRAINTS)' >$@
	@rm $(UNFINISHED)
