"""Rules of the house that no linter knows."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

DRAWERS = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "manager",
    "managers",
    "base",
    "models",
    "types",
}
"""Names that do not describe the content."""

CODE = {".py", ".c", ".h", ".sql", ".sh", ".md", ".toml", ".yaml", ".yml", ".json", ".service", ""}

NOT_OURS = {
    "a path of a developer's machine": re.compile(
        r"/(?:home|Users)/\w+/|(?<!\d)/root/|/work/"
    ),  # /proc/7/root belongs to no developer
    "the number of an issue": re.compile(r"\b[Ii]ssues? #?\d|\(#\d+\)"),
    "a page that is not in the repository": re.compile(
        r"\b(?:PITFALLS?|DESIGN|CASES|STYLE|LEDGER)(?:\.md| \d)"
    ),
    "work that is not done": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
    "history": re.compile(r"\b(?:used to be|was changed|in the old version)\b", re.IGNORECASE),
}
"""Text that is useless to a reader a year from now."""


@pytest.fixture(scope="module")
def ours(our_files: list[Path]) -> list[Path]:
    """Text that we wrote: without the licences and this list of forbidden words."""
    return [
        path
        for path in our_files
        if path.suffix in CODE and not path.name.startswith("LICENSE") and path != Path(__file__)
    ]


def test_no_file_or_folder_is_a_drawer(our_files: list[Path], repository: Path):
    names = {part.split(".")[0] for path in our_files for part in path.relative_to(repository).parts}
    assert not names & DRAWERS


@pytest.mark.parametrize("what", NOT_OURS)
def test_no_file_has_machine_paths_issue_numbers_or_todos(ours: list[Path], repository: Path, what: str):
    result = [
        f"{path.relative_to(repository)}:{number}: {line.strip()[:80]}"
        for path in ours
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NOT_OURS[what].search(line)
    ]
    assert not result


def test_every_module_has_a_docstring(repository: Path):
    silent = [
        str(path.relative_to(repository))
        for folder in ("src", "bench", "docs", "tests")
        for path in (repository / folder).rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_every_sql_file_starts_with_a_comment(repository: Path):
    silent = [
        path.name for path in (repository / "src").rglob("*.sql") if not path.read_text().startswith("--")
    ]
    assert not silent


def test_every_bpf_file_carries_both_licences(repository: Path):
    sources = [path for path in (repository / "bpf").iterdir() if path.suffix in (".c", ".h")]
    wanted = re.compile(r"SPDX-License-Identifier: \(?GPL-2\.0(?:-only)? OR BSD-3-Clause\)?")
    silent = [path.name for path in sources if not wanted.search(path.read_text().split("\n", 1)[0])]
    assert not silent


def test_make_help_lists_every_target(repository: Path):
    stdout = subprocess.run(
        ["make", "help"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    words = {"help", "setup", "demo", "test", "check", "format", "bench", "docs", "clean"}
    assert words <= set(re.findall(r"^make (\S+)", stdout.replace("  make", "make"), re.MULTILINE))


def test_every_module_has_a_name_of_its_own(repository: Path):
    paths = sorted((repository / "src").rglob("*.py"))
    count = Counter(path.name for path in paths if path.stem not in ("__init__", "__main__"))
    shared = [str(path.relative_to(repository)) for path in paths if count[path.name] > 1]
    assert not shared
