"""The emulated libraries are built once, and look like NVIDIA's from outside."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stallscope.capture.probes import elf
from stallscope.demo import build
from stallscope.errors import NotFound, StallscopeError, StorageFailed

pytestmark = pytest.mark.compiler


def exported(library: Path, prefix: str) -> set[str]:
    """Names that the sources declare as API, of one library."""
    sources = build.LIBRARIES[library.name]
    text = "".join((build.SOURCES / source).read_text() for source in sources)
    return {
        name for name in re.findall(r"^API [\w *]*?\*?(\w+)\(", text, re.MULTILINE) if name.startswith(prefix)
    }


@pytest.mark.parametrize(("name", "prefix"), [("libnccl.so.2", "nccl"), ("libcudart.so.12", "cuda")])
def test_every_function_is_exported_and_begins_with_push(libraries: Path, name: str, prefix: str):
    names = exported(libraries / name, prefix)
    assert len(names) > 25
    with elf.open_image(libraries / name) as image:
        result = elf.exported_functions(image, names)
        assert set(result) == names
        assert {elf.probe_entry(image, symbol) for symbol in result.values()} == {elf.Entry.EMULATED}


def test_pnccl_names_are_the_same_functions(libraries: Path):
    names = exported(libraries / "libnccl.so.2", "nccl")
    with elf.open_image(libraries / "libnccl.so.2") as image:
        result = elf.exported_functions(image, names | {f"p{name}" for name in names})
    assert all(result[name].offset == result[f"p{name}"].offset for name in names)


def test_the_library_sources_do_not_mention_scenarios():
    words = re.compile(r"\b(fault|scenario|victim|culprit|straggler|hog|sigstop)\b", re.IGNORECASE)
    assert not [path.name for path in build.SOURCES.glob("*.[ch]") if words.search(path.read_text())]


def test_a_second_build_finds_the_first(tmp_path: Path):
    first = build.build(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert build.build(tmp_path) == first
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_a_missing_compiler_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(NotFound, match="install gcc"):
        build.build(tmp_path)


def test_a_failing_compiler_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(StallscopeError, match="cannot build libcudart"):
        build.build(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_is_reported_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match=r"cannot store .* Not a directory; set XDG_CACHE_HOME"):
        build.build(tmp_path / "file" / "cache")


def test_libraries_built_by_root_are_not_cached_in_a_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build.os, "geteuid", lambda: 0)
    assert not build.cache_folder().is_relative_to(tmp_path)
    monkeypatch.setattr(build.os, "geteuid", lambda: 1000)
    assert build.cache_folder() == tmp_path / ".cache" / "stallscope"


def test_two_builders_at_a_time_agree(tmp_path: Path):
    with ThreadPoolExecutor() as pool:
        folders = set(pool.map(lambda _: build.build(tmp_path), range(3)))
    assert len(folders) == 1
    assert [path.name for path in tmp_path.iterdir()] == [folders.pop().name]


def test_a_strangers_libraries_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build.build(tmp_path)
    monkeypatch.setattr(build.os, "geteuid", lambda: 12345)
    with pytest.raises(StorageFailed, match="not a folder of this user"):
        build.build(tmp_path)
