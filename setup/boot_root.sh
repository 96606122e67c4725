#!/bin/sh
# Makes the root of a Debian 12 with systemd and the package of the agent: boot_root.sh ROOT DEB. Needs root.
set -eu
root=$1 deb=$2
archive=$(apt-get --print-uris update 2>/dev/null | sed -n "s|^'\(.*/debian/\)dists/.*|\1|p" | head -1)
debootstrap --variant=minbase --include=systemd-sysv,iproute2 bookworm "$root" "$archive" >"$root.log" 2>&1 ||
    { tail -n 2 "$root.log" >&2; exit 1; }
cp "$deb" "$root/tmp/stallscope.deb"
chroot "$root" dpkg -i /tmp/stallscope.deb
rm -rf "$root"/tmp/* "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/doc/* "$root"/usr/share/locale/*
rm -f "$root"/var/cache/debconf/*-old
echo machine >"$root/etc/hostname"
echo "127.0.0.1 localhost machine" >"$root/etc/hosts" # debootstrap makes none
passwd=$(sed 's/^root:[^:]*:/root::/' "$root/etc/shadow") && echo "$passwd" >"$root/etc/shadow"
