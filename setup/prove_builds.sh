#!/usr/bin/env bash
# Builds all files of a dist folder again, in a clone with its own environment, and compares them: prove_builds.sh DIST.
set -euo pipefail
dist=$(realpath "$1") commit=$(cat "$1/COMMIT")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
[[ $commit != *-dirty ]] || { echo "prove: $1 was built from changed files; commit them first" >&2; exit 1; }
umask 027 # another umask and another folder than those of the first build
git clone --quiet . "$scratch/clone"
cd "$scratch/clone"
git checkout --quiet "$commit"
make --no-print-directory dist images >"$scratch/log" 2>&1 || { tail -n 5 "$scratch/log" >&2; exit 1; }
diff <(sort -k 2 "$dist/SHA256SUMS") <(sort -k 2 dist/SHA256SUMS) || { echo "prove: the builds differ" >&2; exit 1; }
echo "a second build of $commit produced equal files: $(wc -l <dist/SHA256SUMS)"
