"""The result of prove_install.sh: one row for each artefact, all of one commit."""

import json
import subprocess
import sys
from pathlib import Path


def add(repository: Path, result: Path, commit: str, **row: object) -> None:
    script = repository / "setup/install_row.py"
    subprocess.run([sys.executable, script, result, commit, json.dumps(row)], check=True)


def test_a_row_replaces_the_row_of_its_artefact_and_rows_of_other_commits(repository: Path, tmp_path: Path):
    result = tmp_path / "install.json"
    add(repository, result, "old", artefact="wheel", bytes=1)
    add(repository, result, "new", artefact="wheel", bytes=2)
    add(repository, result, "new", artefact="deb", bytes=3)
    add(repository, result, "new", artefact="wheel", bytes=4)
    content = json.loads(result.read_text())
    assert content["commit"] == "new"
    assert content["artefacts"] == [{"artefact": "deb", "bytes": 3}, {"artefact": "wheel", "bytes": 4}]
