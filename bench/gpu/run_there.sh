#!/bin/sh
# Runs the proof on a machine that has GPUs and PyTorch but not our environment: what may be missing there comes
# from .carry/ (see carry.sh). Arguments go to prove.py, or to classes.py, stacks.py, ioctls.py, single_process.py, serving.py and
# gpu_side.py after "classes", "stacks", "ioctls", "single", "serving", "gpu_side", or to ../inference/lanes.py after "lanes";
# results to $OUT.
set -u
cd "$(dirname "$0")/../.." || exit 1
script=prove.py
[ "${1-}" = classes ] && script=classes.py && shift
[ "${1-}" = stacks ] && script=stacks.py && shift
[ "${1-}" = ioctls ] && script=ioctls.py && shift
[ "${1-}" = single ] && script=single_process.py && shift
[ "${1-}" = serving ] && script=serving.py && shift
[ "${1-}" = lanes ] && script=../inference/lanes.py && shift
[ "${1-}" = gpu_side ] && script=gpu_side.py && shift && make --no-print-directory plugin
budget=560 previous=
for word in "$@"; do
	[ "$previous" = --budget ] && budget=$word
	previous=$word
done
export PYTHONPATH="$PWD/src:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# What the machine has itself goes first: its NumPy is the one that its PyTorch was built for.
python3 -c 'import typer, rich, yaml' 2>/dev/null || export PYTHONPATH="$PYTHONPATH:$PWD/.carry/site"
python3 -c 'import ctypes; ctypes.CDLL("libbpf.so.1")' 2>/dev/null ||
	export LD_LIBRARY_PATH="$PWD/.carry/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PATH="$PATH:$PWD/.carry/bin"
# One that was built here is newer than the one that was carried.
{ command -v clang >/dev/null && ls src/stallscope/capture/*.bpf.o >/dev/null 2>&1; } || cp -f .carry/*.bpf.o src/stallscope/capture/
BENCH_COMMIT=$(cat .carry/commit) && export BENCH_COMMIT
uname -sr
exec timeout --signal=INT --kill-after=20 $((${budget%.*} + 15)) python3 bench/gpu/$script "$@"
