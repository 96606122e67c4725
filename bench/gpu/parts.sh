#!/bin/sh
# Runs several parts on a machine that has GPUs, one after the other: sh bench/gpu/parts.sh "NAME SECONDS ARGUMENTS" ...
# ARGUMENTS are those of run_there.sh. A part that fails or exceeds its SECONDS does not stop the other parts. All output of a
# part is in $OUT/NAME.tgz.00, .01, ...: cat NAME.tgz.* | tar xz
set -u
here=$(dirname "$0")
out=${OUT:?}
work=$(mktemp -d /var/tmp/parts-XXXXXX)
nvidia-smi topo -m 2>/dev/null | head -n 8
for part in "$@"; do
	eval "set -- $part"
	name=$1 seconds=$2
	shift 2
	mkdir -p "$work/$name"
	echo "== $name, at most $seconds s, at $(date +%T)"
	OUT="$work/$name" timeout --signal=INT --kill-after=15 "$seconds" sh "$here/run_there.sh" "$@" \
		>"$work/$name/output.txt" 2>&1 || echo "$name ended with code $?"
	grep -v '^{' "$work/$name/output.txt" | tail -n 60
	tar cz -C "$work" "$name" | split -b 15M -d - "$out/$name.tgz."
done
