#!/bin/sh
# Runs all tests in three processes at once: the tests that trace (each sees the probes of the others, so they need one
# process), the tests of the hub, and the remaining tests. Arguments: the pytest command. The tests that trace wait for
# events of other processes, so the other parts have a lower priority; their output follows.
set -u
output=$(mktemp -d)
pids=
trap 'rm -rf "$output"' EXIT
trap 'kill $pids 2>/dev/null; exit 130' INT TERM
part() { # part NAME pytest... : each part has its own cache folder
	name=$1
	shift
	"$@" -o cache_dir="build/tests/$name" --part "$name"
}
part others nice -n 5 "$@" >"$output/others" 2>&1 &
others=$!
part hub nice -n 5 "$@" >"$output/hub" 2>&1 &
hub=$!
pids="$others $hub"
part tracing "$@"
tracing=$?
wait $others
others=$?
cat "$output/others"
wait $hub
hub=$?
cat "$output/hub"
# pytest exits with 5 when no test of a part was selected.
result=5
for part in "tracing $tracing" "others $others" "hub $hub"; do
	code=${part#* }
	[ "$code" -eq 5 ] && continue
	[ "$code" -eq 0 ] || echo "part ${part% *} of the tests failed: see above" >&2
	[ $result -ne 5 ] && [ $result -ne 0 ] || result=$code
done
exit $result
