"""A new field of a verdict touches two files, and is on every surface then."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stallscope
from stallscope.store.hub.migrations import SCHEMA_VERSION

_FIRST = 'FIELDS = (\n    VerdictField("kind"'
_MOOD = f'VerdictField("mood", "text", "how it feels", hub_schema={SCHEMA_VERSION + 1}),'

EDITS = {
    "diagnose/report/verdict.py": (
        '    severity: str = ""\n',
        '    severity: str = ""\n    mood: str = "calm"\n',
    ),
    "events/verdict_fields.py": (
        _FIRST,
        _FIRST.replace("VerdictField", f"{_MOOD}\n    VerdictField"),
    ),
}
"""By file: text, and what replaces it."""

ALL_SURFACES = """
import json
from pathlib import Path
from tests.surfaces.test_one_diagnosis import SCENARIOS, SURFACES
from stallscope.store import node
trace, db = SCENARIOS["disk"][0](), Path("trace.db")
node.write(db, trace)
print(json.dumps({name: [row["mood"] for row in rows(db, trace)] for name, rows in SURFACES.items()}))
"""


@pytest.fixture
def changed_tree(tmp_path: Path) -> Path:
    """A copy of the package with the new field."""
    package = tmp_path / "src" / "stallscope"
    shutil.copytree(Path(stallscope.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, after) in EDITS.items():
        text = (package / name).read_text()
        assert text.count(before) == 1, name
        (package / name).write_text(text.replace(before, after))
    return tmp_path


def test_a_new_field_touches_two_files(changed_tree: Path, repository: Path):
    assert len(EDITS) <= 2
    path = os.pathsep.join([str(changed_tree / "src"), str(repository), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", ALL_SURFACES],
        cwd=changed_tree,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    on_surfaces = json.loads(done.stdout.splitlines()[-1])
    assert len(on_surfaces) == 5
    assert {name: moods for name, moods in on_surfaces.items() if moods != ["calm"]} == {}
