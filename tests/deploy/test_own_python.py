"""The folder with its own Python: it records nothing of the machine that built it."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def own_python(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(repository / "setup"))
    import own_python

    yield own_python
    sys.modules.pop("own_python")


def test_records_of_the_interpreter_and_of_the_wheels_folder_are_removed(own_python, tmp_path: Path):
    """pip hashes scripts, which name the interpreter, and writes where the wheel came from."""
    folder = tmp_path / "numpy-2.0.dist-info"
    folder.mkdir()
    kept = "numpy/__init__.py,sha256=a,1\nnumpy-2.0.dist-info/RECORD,,\n"
    (folder / "RECORD").write_text(
        f"../../bin/f2py,sha256=b,2\nnumpy-2.0.dist-info/direct_url.json,sha256=c,3\n{kept}"
    )
    (folder / "direct_url.json").write_text('{"url": "file:///home/someone"}')
    own_python.remove_build_paths(tmp_path)
    assert (folder / "RECORD").read_text() == kept
    assert not (folder / "direct_url.json").exists()
