# The one interface to the project; `make` alone says what there is. Works from anywhere with `make -C PATH`:
# every path below is relative to this file's folder.

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# What `make demo`, `make serve`, `make test` and `make bench` hand on: `make test ARGS="tests/wire -x"`.
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo serve test check soak fuzz exact device bench proto vectors clean

help:  ## say what the targets do
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install everything; does nothing the second time

demo: $(STAMP)  ## ask two nodes one question, stop the producer, ask again
	@$(PY) -m muser_wire.cli demo $(ARGS)

serve: $(STAMP)  ## run both nodes in the foreground until Ctrl-C
	@$(PY) -m muser_wire.cli serve $(ARGS)

# One thread each: the tests start several processes, and spinning threads on few cores stall each other.
test: export OMP_NUM_THREADS = 1
test: export OPENBLAS_NUM_THREADS = 1
test: export MKL_NUM_THREADS = 1
test: $(STAMP)  ## fetch the two small models and run every test
	@$(PY) -m muser_wire.cli model fetch smollm2
	@$(PY) -m muser_wire.cli model fetch gemma3-270m
	@$(install_systemd)
	@$(install_chromium)
	@$(install_triton)
	@$(if $(ARGS),$(PY) -m pytest -q $(ARGS),$(every_test))

check: $(STAMP)  ## format, lint, types, house rules, docs
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/test_docs.py tests/test_house.py

soak: $(STAMP)  ## 300 handoffs with random faults, twice
	@MUSER_SOAK_ROUNDS=300 $(PY) -m pytest -q tests/nodes/test_soak.py $(ARGS)

fuzz: $(STAMP)  ## every property test with many more examples, from a fresh seed
	@MUSER_HYPOTHESIS=fuzz $(PY) -m pytest -q --timeout 3600 -m "not slow" $(or $(ARGS),tests/wire tests/decode tests/exact/test_random_models.py)

exact: export OMP_NUM_THREADS = 1
exact: export OPENBLAS_NUM_THREADS = 1
exact: export MKL_NUM_THREADS = 1
exact: $(STAMP)  ## the reference lane's bytes from every library, in whatever chunks, over real handoffs: one table, in ten minutes or so
	@$(PY) -m muser_wire.cli model fetch smollm2
	@$(PY) -m muser_wire.cli model fetch gemma3-270m
	@$(PY) tests/exact/table.py $(ARGS)

device: $(STAMP)  ## on an NVIDIA GPU: admit the kernels, compare bytes with the CPU, measure; elsewhere say so
	@$(PY) -m muser_wire.cli model fetch smollm2
	@$(PY) -m muser_prefill.device $(ARGS)

bench: $(STAMP)  ## measure against the peers, which go into an environment of their own
	@$(install_ibverbs)
	@$(PY) -m bench $(ARGS)

proto: $(STAMP)  ## write muser_wire/stubs again from proto/
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT \
	&& $(PY) -m grpc_tools.protoc -I proto --python_out="$$out" --pyi_out="$$out" proto/muser/v1/*.proto \
	&& for file in "$$out"/muser/v1/*; do \
	    sed 's/^from muser\.v1 import/from muser_wire.stubs import/' "$$file" >"muser_wire/stubs/$${file##*/}"; done

vectors: $(STAMP)  ## write the golden handoff and the golden hashes again
	@$(PY) tests/vectors/generate.py
	@$(PY) tests/vectors/conformance.py

clean:  ## remove what setup, tests and tools made here; fetched models stay
	@rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Tests that start no node, and those of warm prompts and of the references, which have no time bounds, run on all cores; the
# others come after them, one at a time.
TOGETHER := $(addprefix tests/nodes/test_,warm.py warm_reference.py references.py)
ALONE := $(filter-out $(TOGETHER),$(wildcard tests/nodes/test_*.py)) tests/clients $(wildcard tests/test_*.py)
define every_test
$(PY) -m pytest -q -n auto --dist loadfile $(addprefix --ignore ,$(ALONE)) && $(PY) -m pytest -q $(ALONE)
endef

# A command that merely exists may be a shim for a Python that is not there, so each is run before it is chosen.
define find_python
for python in python3.11 python3 python3.12 python3.13; do \
    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
        "$$python" -c 'import ensurepip, venv' 2>/dev/null && break; \
        echo "muser: $$python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; \
    fi; python=; \
done; \
if [ -z "$$python" ]; then echo "muser: Python 3.11 or newer is needed and none was found" >&2; exit 1; fi
endef

# $(call apt_install,test,package,what for,consequence): on Linux, unless the shell test says that it is there, installs a Debian
# package, as root; elsewhere says what goes without it. Nothing here is fatal.
define apt_install
if [ "$$(uname -s)" != Linux ] || $(1) 2>/dev/null; then :; \
elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "muser: installing $(2), $(3)"; \
    { timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 600 \
        apt-get install -y -qq --no-install-recommends $(2); } >/dev/null \
    || echo "muser: that failed; $(4)"; \
else echo "muser: without $(2), Debian's package, $(4)"; fi
endef

# MLX's Linux build links a BLAS without vector code; the decode node loads OpenBLAS before it where that is there.
install_blas = $(call apt_install,$(PY) -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")',libopenblas0-pthread,which \
    speeds up decoding on Linux,decoding works but is slower)

# The page is tested in a real browser.
install_chromium = $(call apt_install,command -v chromium >/dev/null,chromium,in which the page is tested,the tests of the \
    page skip)

# The unit is checked by systemd's own tool, whether systemd runs here or not.
install_systemd = $(call apt_install,command -v systemd-analyze >/dev/null,systemd,whose systemd-analyze checks the unit,the \
    tests of the unit skip)

# Mooncake's engine, a peer of the wire's benchmark, links it even where it uses TCP.
install_ibverbs = $(call apt_install,$(PY) -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")',libibverbs1,which one of the \
    benchmark's peers links,the benchmark of the wire goes without Mooncake)

# A torch with CUDA has brought it. Elsewhere it is 200 MB, so it comes with the tests that need it, not with every setup.
define install_triton
if [ "$$(uname -s)" != Linux ] || $(PY) -c 'import triton' 2>/dev/null; then :; \
else echo "muser: installing Triton, whose interpreter and compiler the tests of its kernels need"; \
    $(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[triton]" \
    || echo "muser: that failed; the tests of the Triton kernels will skip"; fi
endef

$(STAMP): pyproject.toml constraints.txt
	@$(PY) -m pip --version >/dev/null 2>&1 || { $(find_python); "$$python" -m venv --clear $(VENV); }
	@$(PY) -m pip install $(if $(wildcard $@),-q) --disable-pip-version-check -c constraints.txt -e ".[prefill,decode,dev]"
	@$(install_blas)
	@touch $@
