# Everything here works on a fresh machine: the virtual environment is made first.
#   make demo test lint fuzz fuzz-programs models systems bench-planning bench-backend bench-branches bench-overlap bench-loopback \
#        bench-offload bench-systems bench-vllm
#   make test PYTHON=python3      use that interpreter as it is (it has torch >= 2.11) and install nothing

VENV      := .venv
TORCH     := torch==2.13.0
JOBS      ?= $(if $(PYTHON),1,2)
# seconds after which a test run that hangs is ended
TEST_LIMIT_S ?= 1500
# what to test
TESTS     ?= tests/cpu tests/ranks tests/fuzz

ifdef PYTHON
PY    := $(PYTHON)
READY := build/metadata-stamp
export PYTHONPATH := $(CURDIR):$(CURDIR)/build/metadata$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY    := $(VENV)/bin/python
READY := $(VENV)/stamp
endif

# one torch thread per process: test workers and lanes are what runs side by side
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test lint fuzz fuzz-programs models systems bench-planning bench-backend bench-branches bench-overlap bench-loopback \
        bench-offload bench-systems bench-vllm clean

demo: $(READY)
	$(PY) examples/demo.py $(ARGS)

test: $(READY)
	$(ONE_THREAD) timeout --kill-after=30 $(TEST_LIMIT_S) $(PY) -m pytest -p no:cacheprovider -q $(if $(filter-out 0 1,$(JOBS)),-n $(JOBS) --dist loadgroup) $(TESTS) $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m mypy

fuzz: $(READY)
	$(ONE_THREAD) $(PY) -m dynaflow.testing.fuzz $(ARGS)

fuzz-programs: $(READY)
	$(ONE_THREAD) $(PY) -W ignore -m dynaflow.testing.programs $(ARGS)

models: $(READY)
	$(ONE_THREAD) $(PY) -m benchmarks.models $(ARGS)

bench-planning: $(READY)
	$(ONE_THREAD) $(PY) -m benchmarks.planning $(ARGS)

bench-backend: $(READY)
	$(PY) -m benchmarks.backend $(ARGS)

bench-branches: $(READY)
	$(PY) -m benchmarks.branches $(ARGS)

bench-overlap: $(READY)
	$(PY) -m benchmarks.overlap $(ARGS)

bench-loopback: $(READY)
	$(ONE_THREAD) $(PY) -m benchmarks.loopback $(ARGS)

bench-offload: $(READY)
	$(PY) -m benchmarks.offload $(ARGS)

# DynaFlow inside real systems: `make systems`, `make systems SYSTEMS=diffusers`, `make system-diffusers ARGS='-k flux'`.
# systems/<system>.txt is what a system's virtual environment has (their pins clash), in pip's own format, torch among it. Four kinds of
# comment are read: "# pip: ..." is done to it behind the list ("# pip: uninstall -y torchvision", "# pip: install --no-deps a==1"),
# "# tests: a b" names its tests, where they are not tests/systems/test_<system>*.py alone, "# env: A=1" is set while they run, and
# "# runner: module" runs them in the place of pytest.
# (ahead is what benchmarks.ahead compiles with, for another machine: by name only)
SYSTEMS ?= $(filter-out ahead,$(patsubst systems/%.txt,%,$(wildcard systems/*.txt)))

systems: $(SYSTEMS:%=system-%)

system-%: build/systems/%/stamp
	env $(ONE_THREAD) PYTHONPATH= $$(sed -n 's/^# env: //p' systems/$*.txt) timeout --kill-after=30 $(TEST_LIMIT_S) build/systems/$*/bin/python -m $$(sed -n 's/^# runner: //p' systems/$*.txt | grep . || echo pytest) -p no:cacheprovider -q \
	  $$(for name in $$(sed -n 's/^# tests: //p' systems/$*.txt | grep . || echo $*); do ls tests/systems/test_$$name*.py; done) $(ARGS)

bench-systems: build/systems/diffusers/stamp
	PYTHONPATH= build/systems/diffusers/bin/python -m benchmarks.systems $(ARGS)

bench-vllm: build/systems/vllm/stamp
	PYTHONPATH= build/systems/vllm/bin/python -m benchmarks.vllm_serving $(ARGS)

# torch goes first, alone, and is named again each time: see below
.PRECIOUS: build/systems/%/stamp
build/systems/%/stamp: systems/%.txt pyproject.toml
	test -x build/systems/$*/bin/python || python3 -m venv build/systems/$*
	torch=$$(grep '^torch==' $< || grep -q '^# pip: .* torch==' $< || echo $(TORCH)); \
	build/systems/$*/bin/python -m pip install --quiet $$torch wheel && \
	build/systems/$*/bin/python -m pip install --quiet $$torch -r $< 'setuptools>=77' wheel
	sed -n 's/^# pip: //p' $< | while read -r line; do \
	  build/systems/$*/bin/python -m pip $$line --quiet < /dev/null || exit 1; done
	build/systems/$*/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf build out *.egg-info

# torch goes first and alone, and is named again each time: a looser requirement would fetch another build of it, with
# gigabytes of CUDA packages. For the same reason nothing is built in isolation, and timm and torchvision come without
# their dependencies (pillow, huggingface_hub, safetensors and pyyaml are here already).
$(VENV)/stamp: pyproject.toml Makefile
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VENV)/bin/python -m pip install --quiet $(TORCH) 'setuptools>=77' wheel
	$(VENV)/bin/python -m pip install --quiet $(TORCH) --no-build-isolation --editable '.[view,test,lint]'
	$(VENV)/bin/python -m pip install --quiet --no-deps timm==1.0.30 torchvision==0.28.0
	touch $@

# With a given interpreter: no install, but torch still finds the backend, through metadata that lies beside the tree.
build/metadata-stamp: pyproject.toml Makefile
	$(PYTHON) -c 'import torch; v = tuple(int(n) for n in torch.__version__.split(".")[:2]); assert v >= (2, 11), f"torch >= 2.11 is needed, {torch.__version__} found"'
	mkdir -p build/metadata/dynaflow-0.1.0.dist-info
	printf 'Metadata-Version: 2.1\nName: dynaflow\nVersion: 0.1.0\n' > build/metadata/dynaflow-0.1.0.dist-info/METADATA
	printf '[torch_dynamo_backends]\ndynaflow = dynaflow.capture:backend\n' > build/metadata/dynaflow-0.1.0.dist-info/entry_points.txt
	touch $@
