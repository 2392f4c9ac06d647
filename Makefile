# Debian 12, from a checkout: `make run` and `make test` install what is missing first (apt, root).
.DEFAULT_GOAL := help
.PHONY: help run check test test-all test-arm test-emulator test-ggml test-kernels build bench bench-decode gpu-report wheel install-deps clean

program := build/release/apps/fulgur/fulgur

help:
	@echo 'make run           compute attention on sample tensors, check it, denoise a picture'
	@echo 'make check         build, and run what takes less than a minute'
	@echo 'make test          build and run every kind of test, of slow ones a sample'
	@echo 'make test-all      build and run every test (an hour and a half on 2 cores)'
	@echo 'make test-emulator run every test of the GPU kernels in the emulator (20 minutes on 2 cores)'
	@echo 'make test-ggml     build llama.cpp with the backend of integrations/ggml, run ggml'\''s own tests (30 minutes)'
	@echo 'make test-arm      build and run the small tests for ARM, by QEMU'
	@echo 'make test-kernels  compile every kernel that a plan can ask for, several thousand'
	@echo 'make build         build the library, the program and the examples (build/release)'
	@echo 'make bench         measure this machine, add its report and rewrite docs/performance/cpu.md'
	@echo 'make bench-decode  the same of decoding: its table is there, too'
	@echo 'make gpu-report    on a machine with an H100 or H200: tests, sanitizers, the speed table'
	@echo 'make wheel         Python wheels that need nothing of the system (build/wheel)'
	@echo 'make install-deps  install the Debian packages that all of these need'
	@echo 'make clean         remove build/'

run: build
	tools/run.sh

check:
	tools/install_deps.sh build test bench
	cmake --preset release -DFULGUR_TESTS=ON
	cmake --build --preset release
	ctest --preset release -LE slow -j2

test:
	tools/install_deps.sh build test bench
	tools/test.py

test-all:
	tools/install_deps.sh build test bench
	tools/test.py --all

test-emulator:
	tools/install_deps.sh build test bench
	tools/test.py emulator

test-arm:
	tools/install_deps.sh build test
	tools/test.py arm

test-ggml:
	tools/install_deps.sh build test
	integrations/ggml/test.py

test-kernels:
	tools/install_deps.sh build test bench
	cmake --preset release -DFULGUR_TESTS=ON
	cmake --build --preset release --target cuda_compile_test
	FULGUR_COMPILE_ALL=1 build/release/tests/cuda_compile_test --gtest_filter='*IsClean:*AreClean'

build:
	tools/install_deps.sh build
	cmake --preset release -DFULGUR_TESTS=OFF -DFULGUR_BENCH=OFF
	cmake --build --preset release

bench: build
	$(program) bench --grid standard --json build/cpu.json
	@if python3 -c 'import torch' 2>/dev/null; then python3 bench/torch_sdpa.py build/cpu.json; \
	 else echo 'python3 has no torch: not compared'; fi
	tools/cpu_table.py --add build/cpu.json

bench-decode: build
	$(program) bench --grid decode --only batch:1 batch:16 keys:4096 keys:16384 keys:65536 \
	  hq:4 hq:16 hq:32 hq:64 hk:4 page:none even --json build/cpu-decode.json
	tools/cpu_table.py --add build/cpu-decode.json

gpu-report:
	tools/gpu_report.sh

wheel:
	tools/install_deps.sh build test
	tools/wheel.sh

install-deps:
	tools/install_deps.sh build test bench

clean:
	rm -rf build
