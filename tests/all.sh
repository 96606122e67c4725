#!/bin/sh
# All tests, in two processes beside each other: those that trace, which see each other's probes and so must stand in
# one, and the rest. Arguments: how to call pytest. What the rest says comes when both have ended.
set -u
said=$(mktemp)
trap 'rm -f "$said"' EXIT
"$@" -m "not bpf" >"$said" 2>&1 &
rest=$!
trap 'kill $rest 2>/dev/null; exit 130' INT TERM
"$@" -m bpf
tracing=$?
wait $rest
others=$?
cat "$said"
# 5: this half has none of the tests that were asked for.
[ $others -eq 5 ] && exit $tracing
[ $tracing -eq 5 ] && exit $others
[ $tracing -eq 0 ] && exit $others
echo "tests that trace have failed: see above" >&2
exit $tracing
