"""Every module imports only the packages that import_table.py permits."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from . import import_table

EVERYWHERE = ("credentials", "errors")
PACKAGE = Path(__file__).resolve().parent.parent / "src" / "stallscope"

MAY_IMPORT = {part: {*EVERYWHERE, *parts} for part, parts in import_table.MAY_IMPORT.items()}
MAY_IMPORT |= {"credentials": set(), "errors": {"credentials"}}
MAY_IMPORT["commands"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = {"commands", "terminal_text", *EVERYWHERE}

HEAVY = {
    "pyarrow": {
        "query",
        "serve",
        "importers",
        "exporters",
        "store.hub",
        "store.shared",
        "receive",
        "continuous",
        "page",
        "dashboard",
    },
    "duckdb": {"query", "serve", "hub", "store.hub", "store.shared"},
    "psycopg": {"store.shared"},
    "pandas": set(),
}
"""Libraries that cost an agent its memory, and the parts that may use them."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def part(module: str) -> str:
    """The part of the house a module is in: its first name below the package, "" for the package itself.

    The stores of hubs are parts of their own, because the agent has the rest of `store` and must not load them.
    """
    names = module.split(".")
    if names[1:2] == ["store"] and names[2:3] in (["hub"], ["shared"]):
        return ".".join(names[1:3])
    return (*names, "")[1]


def imported(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Dotted names of all that a module imports, also inside functions and under TYPE_CHECKING.

    `from a import b` gives both a and a.b, since b may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            anchor = module.split(".")[: -up or None] if node.level else []
            origin = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from (name for alias in node.names for name in (origin, f"{origin}.{alias.name}"))


def parts_imported(path: Path) -> set[str]:
    names = imported(path.read_text(), dotted(path), is_package=path.stem == "__init__")
    return {part(name) for name in names if name.split(".")[0] == "stallscope"} & set(MAY_IMPORT)


def test_every_part_is_in_the_table():
    there = {part(dotted(path)) for path in modules()} - {""}
    assert there <= set(MAY_IMPORT), "add the new package to tests/import_table.py"


def test_the_table_has_no_circle():
    done: set[str] = set()
    while ready := {p for p in MAY_IMPORT if p not in done and MAY_IMPORT[p] - {p} <= done}:
        done |= ready
    assert done == set(MAY_IMPORT)


def test_every_module_imports_only_the_parts_in_its_row():
    forbidden = {
        dotted(path): extra
        for path in modules()
        if (extra := parts_imported(path) - MAY_IMPORT.get(part(dotted(path)), set()) - {part(dotted(path))})
    }
    assert not forbidden, "see tests/import_table.py"


def inner_modules() -> set[str]:
    """Modules of parts with a public interface that are neither public nor named as an exported function is."""
    public = {f"stallscope.{name}" for names in import_table.PUBLIC.values() for name in names}
    exported = {f"{name}.{each}" for name in public for each in importlib.import_module(name).__all__}
    names = {dotted(path) for path in modules()}
    return {name for name in names if part(name) in import_table.PUBLIC} - public - exported


def test_other_parts_import_only_public_modules():
    inner = inner_modules()
    forbidden = {
        dotted(path): names
        for path in modules()
        if (
            names := {
                name
                for name in imported(path.read_text(), dotted(path), is_package=path.stem == "__init__")
                if name in inner and part(name) != part(dotted(path))
            }
        )
    }
    assert not forbidden, (
        "import a name that the part's __init__ exports, see PUBLIC in tests/import_table.py"
    )


def test_public_modules_export_the_names_that_they_list():
    for name in (name for names in import_table.PUBLIC.values() for name in names):
        module = importlib.import_module(f"stallscope.{name}")
        assert all(hasattr(module, exported) for exported in module.__all__)


def test_heavy_libraries_are_imported_only_by_their_parts():
    forbidden = [
        (dotted(path), library)
        for path in modules()
        for library in {name.split(".")[0] for name in imported(path.read_text(), dotted(path))} & set(HEAVY)
        if part(dotted(path)) not in HEAVY[library]
    ]
    assert not forbidden


def loaded_after(*names: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after importing `names`."""
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_command_line_starts_without_heavy_libraries():
    assert not loaded_after("stallscope.cli") & set(HEAVY)


def test_the_agent_never_loads_heavy_libraries():
    in_agent = MAY_IMPORT["agent"] | {"agent"}
    names = [dotted(path) for path in modules() if part(dotted(path)) in in_agent and path.stem != "__main__"]
    assert not loaded_after(*names) & set(HEAVY)


def test_importing_the_package_needs_no_other_part():
    assert not parts_imported(PACKAGE / "__init__.py")


def test_the_reader_of_imports_sees_all_ways_of_importing():
    source = """
import stallscope.store.node as node
from stallscope import agent
from . import waits
from .causes import io
from ..events.layout import dtype
def later():
    import pyarrow.parquet
"""
    result = set(imported(source, "stallscope.diagnose.blame"))
    wanted = {
        "stallscope.store.node",
        "stallscope.agent",
        "stallscope.diagnose.waits",
        "stallscope.diagnose.causes.io",
        "stallscope.events.layout",
        "pyarrow.parquet",
    }
    assert wanted <= result
    assert "stallscope.diagnose.waits" in set(
        imported("from . import waits", "stallscope.diagnose", is_package=True)
    )
