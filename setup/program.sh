#!/bin/sh
# Downloads programs of a Debian package for tests and unpacks them; nothing is installed.
#
#   program.sh FOLDER PACKAGE/RELEASE [PROGRAM...]    prometheus/bookworm promtool: unpacks FOLDER/usr/bin/promtool;
#                                                     without PROGRAM: the program with the name of the package;
#                                                     FOLDER/usr/share has the package's data
#
# If they are not available, the script prints the reason, and their tests are skipped.
set -u

folder=${1:?usage: program.sh FOLDER PACKAGE/RELEASE [PROGRAM...]}
package=${2%/*}
release=${2#*/}
shift 2
[ $# -gt 0 ] || set -- "$package"
. "$(dirname "$0")/release.sh"

mkdir -p "$folder" && cd "$folder" || exit 1
missing=
for program in "$@"; do
    [ -x "usr/bin/$program" ] || missing="$missing ./usr/bin/$program"
done
[ -n "$missing" ] || exit 0
why=
if look_into "$release" && fetched apt-get -qq download "$package"; then
    # shellcheck disable=SC2086 (one word for each program)
    dpkg --fsys-tarfile "$package"_*.deb | tar -x $missing 2>log || why="no program in $package"
    dpkg --fsys-tarfile "$package"_*.deb | tar -x ./usr/share 2>/dev/null || : # some packages have no data
fi
leave_release
[ -z "$why" ] || printf '%s\n' "setup: no $package: $why; the tests with it will be skipped" >&2
