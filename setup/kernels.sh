#!/bin/sh
# Fetches kernels of Debian's for small machines (tests/kernels); they are unpacked, and nothing is installed.
#
#   kernels.sh FOLDER NAME/RELEASE...    6.12/trixie: of that release, the newest cloud kernel whose version begins so;
#                                        it lies in FOLDER/6.12/boot then, and is not fetched again
#
# Where one cannot be had, that is told, FOLDER/NAME/missing says why, and its test is skipped. A kernel of one's own
# is tried too, if its vmlinuz lies in FOLDER/ANY-NAME/boot.
set -u

folder=${1:?usage: kernels.sh FOLDER NAME/RELEASE...}
shift
. "$(dirname "$0")/release.sh"

fetch() { # fetch NAME RELEASE, into the current folder
    look_into "$2" || return 1
    linux=$(apt-cache pkgnames "linux-image-$1" | sed 's/^linux-image-//' |
        grep -E -- '^[0-9]+\.[0-9]+\.[0-9]+.*-cloud-amd64$' | sort -V | tail -1)
    if [ -z "$linux" ]; then
        why="no cloud kernel of that name in $2"
        return 1
    fi
    # From Debian 14 on the file is in a package of its own, beside the modules.
    package=$(apt-cache pkgnames "linux-binary-$linux" | grep -Fx "linux-binary-$linux" || echo "linux-image-$linux")
    fetched apt-get -qq download "$package" || return 1
    mkdir -p boot
    dpkg --fsys-tarfile "$package"_*.deb | tar -x --wildcards --to-stdout '*/vmlinuz*' >image 2>log
    if [ ! -s image ]; then
        rm -f image
        why="no kernel in $package"
        return 1
    fi
    mv image "boot/vmlinuz-$linux"
}

for kernel in "$@"; do
    name=${kernel%/*}
    mkdir -p "$folder/$name" || exit 1
    (
        cd "$folder/$name" || exit 1
        [ -z "$(find . -name 'vmlinuz-*')" ] || exit 0
        rm -f missing
        why=
        fetch "$name" "${kernel#*/}"
        leave_release
        if [ -n "$why" ]; then
            printf '%s\n' "$why" >missing
            printf '%s\n' "setup: no kernel $name: $why; its test will be skipped" >&2
        fi
    )
done
