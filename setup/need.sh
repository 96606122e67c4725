#!/bin/sh
# Checks the requirements that are not Python packages, and installs missing packages from Debian.
#
#   need.sh venv      Python can make a virtual environment        (required: fails with one line)
#   need.sh bpf       the BPF programs can be built                (optional: exit code 3, one line)
#   need.sh live      this machine can trace now                   (the same)
#   need.sh kernels   virtual machines can run other kernels       (the same)
#   need.sh browser   Chromium can open the hub's page             (optional: exit code 3, one line)
#   need.sh firefox   Firefox can open the hub's page              (the same)
#   need.sh dist      the wheel can be built for all architectures (required: fails with one line)
#   need.sh images    container images can be built                (the same)
#   need.sh shared    PostgreSQL can run for the tests of hubs that share their data (optional: exit code 3, one line)
#   need.sh chroot    packages can be tried in an empty Debian     (optional: exit code 3, one line)
#
# The checks search for commands and files, not for package names, so that they work on other distributions. Missing
# packages are installed only as root or where sudo needs no password.
set -u

PATH=$PATH:/usr/sbin:/sbin
PYTHON=${PYTHON:-python3}

say() { printf '%s\n' "setup: $*" >&2; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_install() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null
}

# The first attempt uses the present package lists; the second attempt updates them, because they may be missing or old.
install_packages() {
    say "installing Debian packages: $*"
    log=$(mktemp) || return 1
    DEBIAN_FRONTEND=noninteractive
    export DEBIAN_FRONTEND
    if as_root apt-get -qq install -y --no-install-recommends "$@" >"$log" 2>&1 ||
        { as_root apt-get -qq update >"$log" 2>&1 &&
            as_root apt-get -qq install -y --no-install-recommends "$@" >"$log" 2>&1; }; then
        rm -f "$log"
        return 0
    fi
    cat "$log" >&2
    rm -f "$log"
    return 1
}

has_command() { command -v "$1" >/dev/null; }
has_libbpf() { ldconfig -p 2>/dev/null | grep -q 'libbpf\.so\.1'; }

missing_for_venv() {
    has_command "$PYTHON" || { echo python3 python3-venv; return; }
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

missing_for_bpf() {
    has_command clang || echo clang
    has_command llvm-strip || echo llvm
    has_command bpftool || echo bpftool
    has_command gcc || echo gcc
    has_command make || echo make
    has_libbpf || echo libbpf1
    [ -e /usr/include/bpf/bpf_helpers.h ] || echo libbpf-dev
    [ -e /usr/include/linux/bpf.h ] || echo linux-libc-dev
    [ -e /usr/include/stdio.h ] || echo libc6-dev
}

missing_for_kernels() {
    has_command qemu-system-x86_64 || echo qemu-system-x86
    has_command busybox || echo busybox-static
    has_command cpio || echo cpio
}

# have LIST: true if everything that LIST checks is present or was installed; otherwise false, with the rest in $missing.
have() {
    missing=$($1 | paste -s -d ' ' -)
    [ -n "$missing" ] || return 0
    # shellcheck disable=SC2086
    can_install && install_packages $missing && [ -z "$($1)" ]
}

need_venv() {
    have missing_for_venv && return 0
    say "Python cannot make a virtual environment; install it as root: apt-get install $missing"
    exit 1
}

need_bpf() {
    have missing_for_bpf && return 0
    say "without live tracing: BPF programs cannot be built; install as root: apt-get install $missing"
    exit 3
}

missing_for_dist() {
    missing_for_bpf
    [ -e /usr/aarch64-linux-gnu/include/asm/unistd.h ] || echo linux-libc-dev-arm64-cross
}

need_dist() {
    have missing_for_dist && return 0
    say "the wheel needs its BPF programs for x86-64 and arm64; install as root: apt-get install $missing"
    exit 1
}

need_live() {
    if [ ! -d /sys/kernel ]; then
        say "without live tracing: /sys is not mounted; mount it: mount -t sysfs sysfs /sys"
        exit 3
    fi
    if [ ! -r /sys/kernel/btf/vmlinux ]; then
        say "without live tracing: this kernel has no BTF (/sys/kernel/btf/vmlinux is missing)"
        exit 3
    fi
    if [ "$(id -u)" -ne 0 ]; then
        say "without live tracing: it needs root; try: make bpf && sudo .venv/bin/stallscope demo --live"
        exit 3
    fi
}

missing_for_browser() {
    has_command chromium || has_command google-chrome || echo chromium fonts-dejavu-core
}

missing_for_firefox() {
    has_command firefox || has_command firefox-esr || echo firefox-esr
}

missing_for_shared() {
    has_command initdb || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || echo postgresql
}

missing_for_slurm() {
    has_command slurmctld || echo slurmctld slurmd slurm-client slurm-wlm-basic-plugins
}

# need_optional LIST TEXT
need_optional() {
    have "$1" && return 0
    say "without $2; install as root: apt-get install $missing"
    exit 3
}

need_kernels() {
    if [ "$(uname -m)" != x86_64 ]; then
        say "without other kernels: they run on x86-64 only"
        exit 3
    fi
    have missing_for_kernels && return 0
    say "without other kernels: virtual machines cannot be started; install as root: apt-get install $missing"
    exit 3
}

missing_for_images() { has_command buildah || echo buildah; }
missing_for_chroot() { has_command debootstrap || echo debootstrap; }

need_images() {
    have missing_for_images && return 0
    say "images need buildah; install as root: apt-get install $missing"
    exit 1
}

need_chroot() {
    have missing_for_chroot && return 0
    say "without a trial of the deb: install as root: apt-get install $missing"
    exit 3
}

case "${1:-}" in
venv) need_venv ;;
bpf) need_bpf ;;
live) need_live && need_bpf ;;
kernels) need_kernels ;;
browser) need_optional missing_for_browser "the tests of the page in Chromium" ;;
firefox) need_optional missing_for_firefox "the tests of the page in Firefox" ;;
shared) need_optional missing_for_shared "the tests of hubs that share their data" ;;
slurm) need_optional missing_for_slurm "the proof with Slurm" ;;
dist) need_dist ;;
images) need_images ;;
chroot) need_chroot ;;
*)
    say "usage: need.sh venv|bpf|live|kernels|browser|firefox|shared|slurm|dist|images|chroot"
    exit 2
    ;;
esac
