#!/bin/sh
# Runs all tests in two processes at once: the tests that trace (each sees the probes of the others, so they need one
# process), and the remaining tests. Arguments: the pytest command. The output of the second process follows the first.
set -u
output=$(mktemp)
trap 'rm -f "$output"' EXIT
half() { # half NAME "MARKERS" pytest...: each half has its own cache folder
	name=$1 markers=$2
	shift 2
	"$@" -o cache_dir="build/tests/$name" -m "$markers"
}
half rest "not bpf" "$@" >"$output" 2>&1 &
rest=$!
trap 'kill $rest 2>/dev/null; exit 130' INT TERM
half tracing bpf "$@"
tracing=$?
wait $rest
others=$?
cat "$output"
# pytest exits with 5 when no test of a half was selected.
[ $others -eq 5 ] && exit $tracing
[ $tracing -eq 5 ] && exit $others
[ $tracing -eq 0 ] && exit $others
echo "tests that trace failed: see above" >&2
exit $tracing
