# `make demo` and `make test` set up what they need in $(VENV) and run.
#
# TORCH is the torch requirement.  Without a GPU it names a release whose CPU build can be had as a plain wheel, so that no
# CUDA build is pulled; set it to what your index offers, TORCH="torch==2.9.1" say.
# An environment that has everything already is used with VENV=/path/to/it.

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3.13 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(HAS_GPU),torch,torch==2.13.0)
MEGATRON_VERSIONS := 0.16.1=3.11 0.19.2=3.12
RUN := $(VENV)/bin/python
export TE_THD_BRIDGE_MEGATRON_SOURCES := $(abspath $(VENV))/megatron

.PHONY: demo test clean

demo: $(VENV)/.ready
	$(RUN) -m te_thd_bridge.cli demo

test: $(VENV)/.ready $(VENV)/.ready-for-tests
	$(RUN) -m pytest $(TESTS)

$(VENV)/.ready: pyproject.toml
	@echo "setting up $(VENV) with $(PYTHON) and $(TORCH)"
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet "$(TORCH)" "setuptools>=68"
	$(RUN) -m pip install --quiet --no-build-isolation --editable .
	touch $@

# The files of Megatron-Core releases, whatever Python their wheels are for: the tests load them from here.
$(VENV)/.ready-for-tests: $(VENV)/.ready
	$(RUN) -m pip install --quiet --no-build-isolation --editable ".[test]"
	for release in $(MEGATRON_VERSIONS); do \
	  version=$${release%=*}; \
	  $(RUN) -m pip download --quiet --no-deps --only-binary=:all: --python-version $${release#*=} --dest $(VENV)/megatron/wheels megatron-core==$$version && \
	  $(RUN) -m zipfile -e $(VENV)/megatron/wheels/megatron_core-$$version-*.whl $(VENV)/megatron/$$version || exit 1; \
	done
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
