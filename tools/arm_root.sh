#!/bin/sh
# Unpacks the libraries that fulgur and its tests need on 64-bit ARM into a folder, from Debian's packages. What apt knows
# of this machine stays as it is.
#   tools/arm_root.sh build/arm-root
set -eu
root=$1
[ ! -e "$root/complete" ] || exit 0

apt=$root/apt
mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$root/packages"
apt=$(cd "$apt" && pwd)
: >"$apt/status"
apt_arm() {
  apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
    -o Dir::State::Lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt" "$@"
}
apt_arm update
(
  cd "$root/packages"
  apt_arm download libcli11-dev libdlpack-dev libfmt-dev libfmt9 libgmock-dev libgtest-dev libhwy-dev libhwy1 \
    libpng-dev libpng16-16 nlohmann-json3-dev zlib1g zlib1g-dev
)
for package in "$root"/packages/*.deb; do
  dpkg -x "$package" "$root"
done
touch "$root/complete"
