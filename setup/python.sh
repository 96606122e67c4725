#!/bin/sh
# Downloads a Python version from a newer Debian release, so that tests can read its frames. The interpreter is unpacked
# together with its libraries; nothing is installed.
#
#   python.sh FOLDER VERSION RELEASE    python.sh build/python3.14 3.14 forky: makes FOLDER/usr/bin/python3.14
#
# Needs apt-get, dpkg and patchelf. If the version is not available, the script prints the reason, and the tests of that
# version are skipped.
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
"$python" -c '' || give_up "the downloaded interpreter does not run"
