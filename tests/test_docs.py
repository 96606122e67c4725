"""The generated pages match the code, and every link has a target."""

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from stallscope import cli, settings
from stallscope.diagnose.causes import all_causes
from stallscope.events import layout, names


@pytest.fixture(scope="module")
def generate(repository: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository / "docs")
        yield importlib.import_module("generate")


def test_the_reference_is_current(generate: ModuleType, repository: Path):
    wanted = generate.pages()
    there = {str(path.relative_to(repository / "docs")) for path in repository.glob("docs/reference/*.md")}
    assert there == {name for name in wanted if name.startswith("reference/")}, "run: make docs"
    old = [name for name, text in wanted.items() if (repository / "docs" / name).read_text() != text]
    assert not old, "run: make docs"


def test_every_setting_column_and_category_is_on_its_page(generate: ModuleType):
    pages = generate.pages()
    for setting in settings.TABLE:
        assert f"| `{setting.name}` |" in pages["reference/settings.md"]
    for table in layout.TABLES:
        assert f"## {table.name}\n" in pages["reference/events.md"]
    assert all(f"| `{name}` |" in pages["reference/categories.md"] for name in names.CATEGORY_NAMES)


def test_every_option_in_the_help_is_on_the_commands_page(generate: ModuleType):
    page = generate.pages()["reference/commands.md"]
    for name, _ in generate.commands_of(cli.app):
        output = CliRunner().invoke(cli.app, [*name.split(), "--help"], env={"COLUMNS": "200"}).output
        options = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", output, re.MULTILINE)) - {"--help"}
        section = page.partition(f"## stallscope {name}\n")[2].partition("\n## ")[0]
        assert options == set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE))


def test_every_category_has_a_description(generate: ModuleType):
    rows = re.findall(
        r"^\| \d+ \| `\w+` \| (.*) \|$", generate.pages()["reference/categories.md"], re.MULTILINE
    )
    assert len(rows) == len(names.Category)
    assert all(rows)


def test_every_cause_has_a_description_of_its_own(generate: ModuleType):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", generate.pages()["reference/causes.md"], re.MULTILINE)
    assert {name for name, _ in rows} == {cause.name for cause in all_causes()}
    assert len({meaning for _, meaning in rows}) == len(rows)


def test_every_module_that_a_package_lists_exists(repository: Path):
    listed = [
        package.parent / line.split()[0]
        for package in (repository / "src").rglob("__init__.py")
        for line in (ast.get_docstring(ast.parse(package.read_text())) or "").splitlines()
        if re.match(r"[a-z_]+/? {2,}\S", line)
    ]
    assert len(listed) > 50
    assert [str(path) for path in listed if not path.is_dir() and not path.with_suffix(".py").is_file()] == []


def test_every_link_between_pages_leads_somewhere(our_files: list[Path], repository: Path):
    dead = [
        f"{page.relative_to(repository)}: {target}"
        for page in our_files
        if page.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not dead


def test_every_decision_is_linked(repository: Path):
    index = (repository / "docs" / "decisions" / "README.md").read_text()
    pages = {path.name for path in (repository / "docs" / "decisions").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set(), "run: make docs"
    assert "docs/decisions/README.md" in (repository / "ARCHITECTURE.md").read_text()


def test_a_number_that_was_not_measured_has_no_row(generate: ModuleType, tmp_path: Path):
    machine = {"n_cpus": 4, "cpu": "CPU", "is_virtual": False, "kernel": "6.1.0-9-amd64"}
    (tmp_path / "agent.json").write_text(json.dumps({"peak_rss_mb": 61.7, "machine": machine}))
    assert list(generate.measured.rows(tmp_path)) == [("memory of the agent", "62 MB", "4 x CPU, Linux 6.1")]


def test_a_result_with_several_parts_has_a_row_for_each(generate: ModuleType, tmp_path: Path):
    machine = {"gpus": ["GPU A, 580", "GPU A, 580"]}
    parts = [
        {
            "description": name,
            "slowdown_percent": slower,
            "spread_percent": 0.26,
            "machine": machine,
        }
        for name, slower in [("steps", 0.31), ("no steps", 0.2)]
    ]
    (tmp_path / "slowdown.json").write_text(json.dumps(parts))
    rows = list(generate.measured.rows(tmp_path))
    assert [(how_much, where) for _, how_much, where in rows] == [
        ("0.3 %", "2 x GPU A"),
        ("0.2 %", "2 x GPU A"),
    ]
    assert rows[1][0].startswith("no steps: ") and "+- 0.3 points" in rows[1][0]
