#!/usr/bin/env bash
# Upgrade trial: an older commit writes a trace, this version opens it; the older version refuses a newer trace in one
# line: prove_upgrade.sh PYTHON COMMIT. COMMIT: of the older version.
set -euo pipefail
python=$1 commit=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/old"
git archive "$commit" src | tar -x -C "$scratch/old"
run() { # run SOURCES ARGUMENTS...
	sources=$1
	shift
	PYTHONPATH=$sources "$python" -c 'from stallscope.cli import main; main()' "$@"
}
run "$scratch/old/src" demo sleep --no-bpf --db "$scratch/old.db" >"$scratch/old.txt"
grep -q 'Rank 2' "$scratch/old.txt"
code=0
run src explain --db "$scratch/old.db" >"$scratch/new.txt" || code=$?
[ "$code" = 20 ] && grep -q 'Rank 2' "$scratch/new.txt"
run src demo sleep --no-bpf --db "$scratch/new.db" >/dev/null
"$python" - "$scratch/new.db" <<'END'
import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as db:
    version = db.execute("SELECT MAX(version) FROM schema_version").fetchone()[0]
    db.execute("INSERT INTO schema_version VALUES (?, 0)", (version + 1,))  # a future version
END
for sources in src "$scratch/old/src"; do
	code=0
	run "$sources" explain --db "$scratch/new.db" >/dev/null 2>"$scratch/refused.txt" || code=$?
	[ "$code" = 2 ] && [ "$(wc -l <"$scratch/refused.txt")" = 1 ] && grep -q 'newer stallscope' "$scratch/refused.txt"
done
cat "$scratch/refused.txt"
echo "upgrade from $(git log -1 --format='%h (%ad)' --date=short "$commit"): the trace opens; a newer trace is refused in one line"
