#!/bin/sh
# Fetches Debian's kernels for small machines and unpacks them; nothing is installed.
#
#   kernels.sh FOLDER PATTERN...    the newest cloud kernel of each pattern: 6.1.0 6.12
#
# A pattern that Debian's lists do not have is told and left out.
set -u

say() { printf '%s\n' "kernels: $*" >&2; }

folder=${1:?usage: kernels.sh FOLDER PATTERN...}
shift
if ! command -v apt-get >/dev/null; then
    say "no apt-get: put vmlinuz files into folders $folder/NAME/boot"
    exit 0
fi
mkdir -p "$folder" && cd "$folder" || exit 1
for pattern in "$@"; do
    name=$(apt-cache pkgnames "linux-image-$pattern" | grep -E -- '-cloud-amd64$' | grep -E '[0-9]+\.[0-9]+\.[0-9]+' | sort -V | tail -1)
    if [ -z "$name" ]; then
        say "$pattern: not in the package lists (apt-get update)"
    elif [ ! -d "$name" ]; then
        say "fetching $name"
        if apt-get -qq -o APT::Sandbox::User=root download "$name"; then
            dpkg -x "$name"_*.deb "$name" && rm -f "$name"_*.deb
        else
            say "$name: could not be fetched"
        fi
    fi
done
