#!/bin/sh
# Installs a build of the library and uses it from another project, by find_package and by
# pkg-config: tools/check_install.sh BUILD_FOLDER
set -eu
build=$(cd "$1" && pwd)
consumer=$(cd "$(dirname "$0")/../tests/install" && pwd)
rm -rf "$build/prefix" "$build/consumer"
cmake --install "$build" --prefix "$build/prefix"

cmake -S "$consumer" -B "$build/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$build/prefix"
cmake --build "$build/consumer"
"$build/consumer/consumer"

pc=$(find "$build/prefix" -name fulgur.pc)
flags=$(PKG_CONFIG_PATH=$(dirname "$pc") pkg-config --cflags --libs fulgur)
gcc -c "$consumer/c_part.c" -o "$build/consumer/c_part.o" $flags
# shellcheck disable=SC2086  # a list of flags
g++ -std=c++20 "$consumer/main.cpp" "$build/consumer/c_part.o" $flags -o "$build/consumer/by_pkg_config" \
  "-Wl,-rpath,$(dirname "$(dirname "$pc")")"
"$build/consumer/by_pkg_config"
