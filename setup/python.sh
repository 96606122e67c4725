#!/bin/sh
# Fetches a Python that this Debian does not have yet from a newer one, so that its frames can be read in tests;
# it is unpacked, with the libraries that it needs beside it, and nothing is installed.
#
#   python.sh FOLDER VERSION RELEASE    python.sh build/python3.14 3.14 forky: FOLDER/usr/bin/python3.14 runs then
#
# Needs apt-get, dpkg and patchelf. Where it cannot be had, that is told, and the tests of that version are skipped.
set -u

. "$(dirname "$0")/release.sh"
version=${2:?usage: python.sh FOLDER VERSION RELEASE}
release=${3:?usage: python.sh FOLDER VERSION RELEASE}
give_up() {
    printf '%s\n' "setup: no Python $version: $*; tests that need it will be skipped" >&2
    exit 0
}

"python$version" -c '' 2>/dev/null && exit 0
command -v patchelf >/dev/null || give_up "no patchelf"
mkdir -p "$1" && cd "$1" || exit 1
python=$PWD/usr/bin/python$version
[ -x "$python" ] && "$python" -c '' 2>/dev/null && exit 0
look_into "$release" || give_up "$why"
fetched apt-get -qq -y --no-install-recommends --download-only install \
    "python$version-minimal" "libpython$version-stdlib" || give_up "$why"
for package in archives/*.deb; do
    dpkg -x "$package" .
done
leave_release
libraries=$(echo "$PWD"/usr/lib/*-linux-gnu*)
loader=$libraries/$(basename "$(patchelf --print-interpreter "$python")")
patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$python"
"$python" -c '' || give_up "what was fetched does not run"
