#!/bin/sh
# Installs the Debian packages that are missing; without apt or root, says which ones are and fails.
#   tools/install_deps.sh [build] [test] [bench] [arm]     groups; build by default
set -eu

header() { echo "#include <$1>" | g++ -E -x c++ - >/dev/null 2>&1; }
clang_links() { echo "int $1" | clang++ "$2" -x c - -o /dev/null >/dev/null 2>&1; }

# need PACKAGE COMMAND...: the package is missing when the command fails.
missing=""
need() {
  package=$1
  shift
  "$@" >/dev/null 2>&1 || missing="$missing $package"
}

for group in "${@:-build}"; do
  case $group in
    build)
      need cmake command -v cmake
      need g++ command -v g++
      need ninja-build command -v ninja
      need libcli11-dev header CLI/CLI.hpp
      need libdlpack-dev header dlpack/dlpack.h
      need libfmt-dev header fmt/core.h
      need libhwy-dev header hwy/highway.h
      need libpng-dev header png.h
      need nlohmann-json3-dev header nlohmann/json.hpp
      ;;
    test)
      need ccache command -v ccache
      need libgtest-dev header gtest/gtest.h
      need pkg-config command -v pkg-config
      need python3-dev sh -c \
        'test -f "$(python3 -c "import sysconfig; print(sysconfig.get_path(\"include\"))")/Python.h"'
      need python3-venv python3 -c 'import ensurepip, venv'
      need clang command -v clang++
      need libclang-rt-dev clang_links 'LLVMFuzzerTestOneInput() { return 0; }' -fsanitize=fuzzer
      need libomp-dev clang_links 'main() { return 0; }' -fopenmp
      need llvm command -v llvm-symbolizer
      ;;
    bench) need libbenchmark-dev header benchmark/benchmark.h ;;
    arm)
      need g++-aarch64-linux-gnu command -v aarch64-linux-gnu-g++
      need qemu-user command -v qemu-aarch64
      ;;
    *)
      echo "install_deps.sh: got group '$group', want build, test, bench or arm" >&2
      exit 2
      ;;
  esac
done
[ -n "$missing" ] || exit 0

as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo"
if ! command -v apt-get >/dev/null || { [ -n "$as_root" ] && ! command -v sudo >/dev/null; }; then
  echo "install_deps.sh: no apt-get or no root here; install these packages (Debian's names):" >&2
  echo " $missing" >&2
  exit 1
fi
echo "installing:$missing"
# shellcheck disable=SC2086  # $missing is a list, $as_root may be nothing
{
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q update
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $missing
}
