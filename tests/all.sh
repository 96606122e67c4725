#!/bin/sh
# All tests, in two processes beside each other: those that trace, which see each other's probes and so must stand in
# one, and the rest. Arguments: how to call pytest. What the rest says comes when both have ended.
# What failed is tried once more when nothing else runs, and told as such: beside the other half a core may be busy
# for longer than a test can tell from a fault.
set -u
said=$(mktemp)
trap 'rm -f "$said"' EXIT
half() { # half NAME "MARKERS" pytest...: each half remembers its own failures
	name=$1 markers=$2
	shift 2
	"$@" -o cache_dir="build/tests/$name" -m "$markers"
}
again() { # again STATUS NAME "MARKERS" pytest...: the status of the half, after its failures were tried alone
	[ "$1" -eq 1 ] || return "$1"
	shift
	echo "tried again with nothing beside it: what failed among the tests of '$1'"
	half "$@" --last-failed --last-failed-no-failures none
}
half rest "not bpf" "$@" >"$said" 2>&1 &
rest=$!
trap 'kill $rest 2>/dev/null; exit 130' INT TERM
half tracing bpf "$@"
tracing=$?
wait $rest
others=$?
cat "$said"
again $tracing tracing bpf "$@"
tracing=$?
again $others rest "not bpf" "$@"
others=$?
# 5: this half has none of the tests that were asked for.
[ $others -eq 5 ] && exit $tracing
[ $tracing -eq 5 ] && exit $others
[ $tracing -eq 0 ] && exit $others
echo "tests that trace have failed: see above" >&2
exit $tracing
