# The commands of a day. `make` builds, `make run` shows the library at work, `make test` tests it.
# All of it is CMake (see CMakePresets.json); this file only saves typing. All paths are relative,
# so that the directory's name may hold spaces.

MAKEFLAGS += --no-print-directory
# CUDA=auto, all, off, or architectures ("80;90a"); kept until another is given.
CUDA ?=
PREFIX ?= /usr/local
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
GENERATOR := $(shell command -v ninja >/dev/null 2>&1 && echo Ninja || echo Unix Makefiles)

# The build directory of a preset: release is build/, the others are build-<preset>/.
build_dir = $(if $(filter release,$(1)),build,build-$(1))
build = cmake --build $(call build_dir,$(1)) --parallel $(JOBS)

all: build/.configured
	@$(call build,release)

run: build/.configured
	@$(call build,release) --target library flashattn_cli
	@build/flashattn job examples/minilm

# The Python package's tests run in a virtual environment, build/venv, with what pip fetches into it; where
# it cannot, a line says so.
test: build/.configured
	$(if $(FA_ALL_TESTS),@cmake build $(emulated_option) >/dev/null)
	@tools/test-python.sh --prepare build >/dev/null 2>&1 & \
		$(call build,release); status=$$?; wait; exit $$status
	@tools/run-tests.sh --with-python build $(JOBS)

test-python:
	@tools/test-python.sh build

bench: build/.configured
	@$(call build,release) --target library flashattn_cli
	build/flashattn bench --pass forward --heads 16 --dim 64 --seq 512,1024,4096
	build/flashattn bench --pass forward --heads 16 --dim 64 --seq 512,1024,4096 --causal
	build/flashattn bench --pass backward --heads 16 --dim 64 --seq 512,1024
	build/flashattn bench --pass decode --heads 32 --dim 128 --seq-k 8192

bench-peers: build/.configured
	@$(call build,release) --target library flashattn_cli
	python3 bench/peers_cpu.py

install: build/.configured
	@$(call build,release) --target library flashattn_cli
	cmake --install build --prefix "$(PREFIX)"

# The whole suite again under the sanitizers, or what CTEST_OPTIONS leave of it; they serve test-threads, too.
test-sanitize: build-asan/.configured
	@$(call build,asan)
	@tools/run-tests.sh build-asan $(JOBS) $(CTEST_OPTIONS)

# Data races. libarcher tells the thread sanitizer what clang's OpenMP library synchronizes; without
# it every parallel loop would look like a race.
ARCHER = $(shell dirname "$$(readlink -f "$$(command -v clang)")")/../lib/libarcher.so
test-threads: build-tsan/.configured
	@$(call build,tsan) --target thread_tests
	@test -f "$(ARCHER)" || { echo "$(ARCHER) is missing (Debian: libomp-dev)" >&2; exit 1; }
	@OMP_TOOL_LIBRARIES="$(ARCHER)" TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
		tools/run-tests.sh build-tsan $(JOBS) -R '^test_threads' $(CTEST_OPTIONS)

format:
	@tools/format.sh

lint:
	@tools/lint.sh

clean:
	rm -rf build build-debug build-gcc build-clang build-asan build-tsan build-fuzz build-aarch64

build/.configured: build/.cuda
	@cmake --preset release -G "$(GENERATOR)" $(cuda_option) $(emulated_option)
	@touch $@

build-%/.configured: build-%/.cuda
	@cmake --preset $* -G "$(GENERATOR)" $(cuda_option)
	@touch $@

# AMX with emulated tiles takes 20 core-seconds to compile, for tests that FA_ALL_TESTS runs.
emulated_option = -DFA_TEST_AMX_EMULATED=$(if $(FA_ALL_TESTS),ON,OFF)

# The CUDA= that a build directory is for; written, and so newer, only when another one is given.
cuda_option = $(if $(CUDA),"-DFA_CUDA=$(CUDA)")
define record_cuda
@mkdir -p $(@D)
@if [ ! -f $@ ] || { [ -n "$(CUDA)" ] && [ "$(CUDA)" != "$$(cat $@)" ]; }; then \
	echo "$(CUDA)" >$@; \
fi
endef
build/.cuda: FORCE
	$(record_cuda)
build-%/.cuda: FORCE
	$(record_cuda)
FORCE:

help:
	@echo "make                    build the library, the command and the tests into build/"
	@echo "make CUDA=all           ... with CUDA kernels for every architecture; CUDA=off: without;"
	@echo "                        default: for the GPU of this machine, if there is one"
	@echo "make run                attention of a real transformer's layer, then a sweep over lengths"
	@echo "make test               run all tests; those of the Python package where pip can fetch"
	@echo "                        what they need"
	@echo "make test-python        build the Python package and run its tests"
	@echo "make bench              time this machine; make bench-peers: beside PyTorch"
	@echo "make install PREFIX=    install (default $(PREFIX))"
	@echo "make format             lay out all C sources with clang-format"
	@echo "make lint               formatting, static analysis, layer order, documents"
	@echo "make test-sanitize      all tests under the address and undefined-behaviour sanitizers"
	@echo "make test-threads       the threaded tests under the thread sanitizer"
	@echo "make clean              remove the build directories"

.PHONY: all run test test-python bench bench-peers install test-sanitize test-threads format lint clean help FORCE
.PRECIOUS: build-%/.configured build-%/.cuda
