#!/usr/bin/env bash
# Builds the wheel, the sdist and the one-file program: dist.sh BIN OUT. BIN: an environment with build and shiv.
# The one-file program contains numpy and grpcio, so it runs on the minor version of Python that built it.
set -euo pipefail
bin=$1 out=$2
rm -rf "$out"
"$bin/python" -m build --outdir "$out" . >build/dist.log 2>&1 || { tail -n 3 build/dist.log >&2; exit 1; }
wheel=$(ls "$out"/*.whl)
minor=$("$bin/python" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
"$bin/shiv" --reproducible --no-modify --console-script stallscope --python "/usr/bin/env python$minor" \
	--output-file "$out/stallscope-py$minor.pyz" "$wheel[export]" >>build/dist.log 2>&1 || { tail -n 3 build/dist.log >&2; exit 1; }
du -h "$out"/*
