#!/bin/sh
# Copies what a GPU report runs, and the Debian libraries it needs, into one folder that works on a
# machine without them: tools/gpu_pack.sh BUILD_FOLDER TO [MODULE]
# MODULE is the Python package's _fulgur*.so for the Python of that machine: with it the package goes, too.
set -eu
build=$1
to=$2
module=${3:-}
mkdir -p "$to"
cp "$build/tests/gpu_tests.txt" "$to/" # made by tests/CMakeLists.txt
for file in $(sed 's|\([^ ]*\) .*|tests/\1|' "$to/gpu_tests.txt") apps/fulgur/fulgur src/libfulgur.so.0; do
  cp -L "$build/$file" "$to/"
  strip "$to/$(basename "$file")"
done
ldd "$to/attention_test" "$to/fulgur" | awk '/lib(fmt|hwy|gomp|stdc\+\+)\.so/ { print $3 }' | sort -u |
  while read -r library; do cp -L "$library" "$to/"; done
# Kernels that cuda_compile_test has compiled: where NVRTC is the same, that machine need not.
if [ -d "$build/tests/cubins" ]; then
  rm -rf "$to/cubins"
  cp -R "$build/tests/cubins" "$to/"
  chmod 700 "$to/cubins"
fi
if [ -n "$module" ]; then
  mkdir -p "$to/python"
  cp -R "$(dirname "$0")/../python/fulgur" "$to/python/"
  cp "$module" "$to/python/fulgur/"
fi
