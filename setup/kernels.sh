#!/bin/sh
# Downloads Debian kernels for virtual machines (tests/kernels) and unpacks them; nothing is installed.
#
#   kernels.sh FOLDER NAME/RELEASE...    6.12/trixie: the newest cloud kernel of that release whose version begins with
#                                        6.12, unpacked to FOLDER/6.12/boot and not downloaded again
#
# If a kernel is not available, the script prints and writes the reason to FOLDER/NAME/missing, and its test is skipped.
# Any other kernel with a vmlinuz in FOLDER/ANY-NAME/boot is tested as well.
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
    # From Debian 14 on, the kernel and its modules are in separate packages.
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
