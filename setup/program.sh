#!/bin/sh
# Downloads a program from Debian for tests and unpacks it; nothing is installed.
#
#   program.sh FOLDER PACKAGE/RELEASE    prometheus/bookworm: unpacks FOLDER/usr/bin/prometheus
#
# If it is not available, the script prints the reason, and its tests are skipped.
set -u

folder=${1:?usage: program.sh FOLDER PACKAGE/RELEASE}
package=${2%/*}
. "$(dirname "$0")/release.sh"

mkdir -p "$folder" && cd "$folder" || exit 1
[ ! -x "usr/bin/$package" ] || exit 0
why=
if look_into "${2#*/}" && fetched apt-get -qq download "$package"; then
    dpkg --fsys-tarfile "$package"_*.deb | tar -x "./usr/bin/$package" 2>log || why="no program in $package"
fi
leave_release
[ -z "$why" ] || printf '%s\n' "setup: no $package: $why; the tests with it will be skipped" >&2
