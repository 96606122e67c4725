#!/usr/bin/env bash
# Installs the files of a dist folder outside the checkout and runs the first commands of a user with each:
# prove_install.sh DIST RESULT. Writes size in bytes, seconds to the first verdict and exit codes as JSON. Needs root.
set -euo pipefail
dist=$(realpath "$1") result=$(realpath -m "$2")
commit=$(git describe --always --dirty --abbrev=12)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
unset PYTHONPATH

rows=()
try() { # try NAME FILE COMMAND...: the first minute with one artefact
	name=$1 file=$2
	shift 2
	begin=$(date +%s.%N)
	"$@" demo >demo.txt
	seconds=$(python3 -c "import time; print(round(time.time() - $begin, 1))")
	grep -q '^Rank 2' demo.txt
	"$@" --version
	"$@" demo --live --db "$name.db" >live.txt
	grep -q '^Rank 2' live.txt
	explained=0
	"$@" explain --db "$name.db" >explain.txt || explained=$?
	grep -q '^Rank 2' explain.txt
	checked=0
	"$@" check >check.txt || checked=$?
	rows+=("{\"artefact\": \"$name\", \"bytes\": $(stat -c %s "$file"), \"first_verdict_s\": $seconds, \"explain_exit\": $explained, \"check_exit\": $checked}")
	echo "$name: first verdict after $seconds s; demo, demo --live, explain and check ran"
}

python3 -m venv wheel
wheel/bin/pip --quiet --disable-pip-version-check install "$dist"/*.whl
try wheel "$dist"/*.whl wheel/bin/stallscope
pyz=$(ls "$dist"/*.pyz)
SHIV_ROOT=$scratch/shiv try pyz "$pyz" env -i PATH="$PATH" SHIV_ROOT="$scratch/shiv" XDG_CACHE_HOME="$scratch/cache" "$pyz"
(IFS=,; printf '{"commit": "%s", "python": "%s", "artefacts": [%s]}\n' "$commit" "$(python3 -V)" "${rows[*]}") | python3 -m json.tool >"$result"
