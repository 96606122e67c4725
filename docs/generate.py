"""Writes docs/reference, the list of decisions and blocks of other pages from the code.

`make docs` writes; a test compares. A page is one function here that returns its text.
"""

import ast
import dataclasses
import importlib
import inspect
import io
import itertools
import json
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import measured
import test_matrix
import typer
from typer.models import ArgumentInfo
from typer.testing import CliRunner

from stallscope import cli, errors, settings
from stallscope.assistant import mcp_server
from stallscope.commands.file_kinds import KINDS
from stallscope.diagnose import thresholds
from stallscope.diagnose.causes import _registry
from stallscope.errors import StallscopeError
from stallscope.events import layout, names
from stallscope.exporters.metric_table import METRICS
from stallscope.exporters.metric_values import MAX_SERIES
from stallscope.live.incident_lines import ATTRIBUTES
from stallscope.query import trace_schema
from stallscope.query.sql_functions import FUNCTIONS
from stallscope.query.trace_views import VIEWS
from stallscope.serve import tools as hub_tools
from stallscope.serve.tools.tool_registry import Tool, collected

DOCS = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/generate.py from the code: change the code and run `make docs`. -->"

FORMATS = {
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
}


def pages() -> dict[str, str]:
    """Text of every generated page, by its path below docs/."""
    written = {f"reference/{name}.md": _page(*write()) for name, write in REFERENCE.items()}
    written["reference/README.md"] = _page("Reference", _contents(written))
    written["test-matrix.md"] = _page(*test_matrix.page())
    production = (DOCS / "production.md").read_text()
    written["production.md"] = _filled(production, "artefacts", test_matrix.artefacts())
    written["decisions/README.md"] = _page("Decisions", _decisions(DOCS / "decisions"))
    written["../README.md"] = _readme((DOCS.parent / "README.md").read_text())
    written["single-processes.md"] = _single_processes((DOCS / "single-processes.md").read_text())
    written["../ARCHITECTURE.md"] = _filled(
        (DOCS.parent / "ARCHITECTURE.md").read_text(), "imports", _imports()
    )
    written["files.md"] = _files((DOCS / "files.md").read_text())
    return written


def _files(text: str) -> str:
    """The page on files of other tools, with the kinds of files and the measured answers."""
    kinds = _table(
        ("your file", "possible answers", "command"),
        [(kind.file, kind.answers, f"`{kind.command.replace('; ', '`, `')}`") for kind in KINDS],
    )
    results = DOCS.parent / "bench" / "results"
    blocks = {
        "kinds": kinds,
        "accuracy": measured.files_table(results),
        "comparison": measured.comparison(results),
    }
    for name, block in blocks.items():
        text = _filled(text, name, block)
    return text


def _imports() -> str:
    """The table of imports that tests/test_imports.py enforces, one row per package."""
    source = ast.parse((DOCS.parent / "tests" / "import_table.py").read_text())
    names = {node.targets[0].id: node.value for node in source.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    table: dict[str, list[str]] = ast.literal_eval(names["MAY_IMPORT"])
    rows = [(f"`{part}`", ", ".join(f"`{name}`" for name in sorted(parts))) for part, parts in table.items()]
    return _table(("package", "may import"), rows)


def _readme(text: str) -> str:
    """The README with its two generated blocks: the answer of the demo and the measurements."""
    answer = f"```\n$ stallscope demo\n{_first_answer()}\n```\n"
    rows = list(measured.rows(DOCS.parent / "bench" / "results"))
    numbers = f"\n## Numbers\n\n{_table(('what', 'measured', 'on'), rows)}" if rows else ""
    return _filled(_filled(text, "first answer", answer), "numbers", numbers)


def _single_processes(text: str) -> str:
    """The page with its table of jobs, from the result of bench/gpu/single_process.py."""
    result = json.loads((DOCS.parent / "bench" / "results" / "single_process.json").read_text())
    sums = (
        f"Traces of {_jobs_by_commit(result['n_jobs_by_commit'])} on {result['machine']['gpus'][0]}, explained at "
        f"commit {result['explained_at']}: {result['n_causes_right']} of {result['n_faults']} causes right, "
        f"{result['n_lines_right']} with the right line of code; {result['n_shares_within_10_points']} right causes "
        f"with a share within 10 points of the job's own measurement; {result['n_healthy_accused']} of "
        f"{result['n_healthy']} healthy jobs got a fault. py-spy confirms {result['n_within_10_points_of_py_spy']} of "
        f"{result['n_with_py_spy']} shares of faults to 10 points, and torch.profiler "
        f"{result['n_gpu_busy_within_10_points_of_profiler']} of {result['n_with_profiler']} shares of busy GPUs. "
        f"Not run: {', '.join(result['not_run']) or 'none'}."
    )
    heads = ("name", "cause", "right", "line", "job", "stallscope", "py-spy", "GPU busy", "torch.profiler")
    rows = [
        (
            each["job"],
            each["cause"] or "",
            "yes" if each["is_cause_right"] else "no",
            "yes" if each["is_line_right"] else "no",
            *(
                "" if each[name] is None else f"{each[name]:.2f}"
                for name in ("job_share", "reported_share", "py_spy_share", "gpu_busy", "profiler_gpu_busy")
            ),
        )
        for each in result["jobs"]
    ]
    return _filled(text, "jobs", f"\n{textwrap.fill(sums, 120)}\n\n{_table(heads, rows)}\n")


def _jobs_by_commit(n_jobs: dict[str, int]) -> str:
    return " and ".join(f"commit {commit} ({n} jobs)" for commit, n in n_jobs.items())


def _filled(text: str, name: str, block: str) -> str:
    """The text with a new block between two marks."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    head, _, rest = text.partition(begin)
    _, mark, tail = rest.partition(end)
    assert mark, f"the mark {end} is missing"
    return head + begin + block + end + tail


def _first_answer() -> str:
    answered = CliRunner().invoke(cli.app, ["demo"])
    assert answered.exit_code == 0, answered.output
    return answered.output.rstrip()


def _settings() -> tuple[str, str]:
    head = (
        "A flag overrides the environment, the environment overrides the settings file, and the file overrides\n"
        "the default. The file contains lines of the form `key: value` (YAML). Its path is the value of\n"
        f"`--settings` or `STALLSCOPE_SETTINGS`; otherwise `{settings.DEFAULT_FILE}` is read if it exists.\n"
        "A name that is not in this table is an error. Sizes may have a unit: `500MB`, `10GB`, `2GiB`.\n\n"
    )
    rows = [
        (
            f"`{s.name}`",
            f"`{s.flag}`" if s.flag else "",
            f"`{s.environment}`",
            _default(s),
            s.about.unit,
            _meaning(s),
        )
        for s in settings.TABLE
    ]
    return "Settings", head + _table(("key", "flag", "environment", "default", "unit", "meaning"), rows)


def _default(setting: settings.Setting) -> str:
    return "" if setting.default in (None, "") else f"`{setting.default}`"


def _meaning(setting: settings.Setting) -> str:
    about = setting.about
    limits = [
        f"at least {about.minimum:,.10g}" if about.minimum is not None else "",
        f"at most {about.maximum:,.10g}" if about.maximum is not None else "",
    ]
    return "; ".join(filter(None, [about.meaning, *limits]))


def _commands() -> tuple[str, str]:
    head = (
        "`stallscope COMMAND --help` prints the same text. An option that is also a [setting](settings.md) may\n"
        "be in the environment or the settings file instead. [Exit codes](errors.md).\n"
    )
    return "Commands", head + "".join(_command(words, function) for words, function in commands_of(cli.app))


def commands_of(app: typer.Typer, before: str = "") -> Iterator[tuple[str, Callable[..., object]]]:
    """Name and function of every command; a group that is itself a command precedes its subcommands."""
    if app.registered_callback and app.registered_callback.callback and before:
        yield before.strip(), app.registered_callback.callback
    for info in app.registered_commands:
        assert info.callback
        yield f"{before}{info.name or info.callback.__name__.strip('_')}", info.callback
    for group in app.registered_groups:
        assert group.typer_instance
        yield from commands_of(group.typer_instance, f"{before}{group.name} ")


def _command(words: str, function: Callable[..., object]) -> str:
    hints = typing.get_type_hints(function, include_extras=True)
    rows = [
        _parameter(name, typing.get_args(hints[name]), parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if hints[name] is not typer.Context and not _is_hidden(hints[name])
    ]
    about = (inspect.getdoc(function) or "").replace(
        "\b\n", ""
    )  # a mark that keeps the lines of a table in --help
    title = f"\n## stallscope {words}\n\n{about}\n"
    return title + (f"\n{_table(('option', 'default', 'meaning'), rows)}" if rows else "")


def _is_hidden(hint: object) -> bool:
    """Whether an option is accepted but not listed: the former name of another option."""
    return any(getattr(about, "hidden", False) for about in typing.get_args(hint))


def _parameter(name: str, annotation: Sequence[Any], default: object) -> tuple[str, str, str]:
    kind, about = annotation
    is_argument = isinstance(about, ArgumentInfo)
    # In Annotated, typer stores the first name of an option as the default.
    named = about.default if isinstance(about.default, str) else f"--{name.replace('_', '-')}"
    flag = name.upper() if is_argument else named
    value = "" if kind is bool or is_argument else f" {name.upper()}"
    shown = "required" if default is inspect.Parameter.empty else f"`{default}`" if default else ""
    return f"`{flag}{value}`", shown, about.help or ""


def _events() -> tuple[str, str]:
    head = (
        "The record types. The SQL tables of a node trace have the same names and columns, with an `id` as the\n"
        "first column and one column per [category](categories.md) of the time ledger (`on_cpu_ns` and so on).\n"
        "Times are ns on the node's CLOCK_MONOTONIC. An unknown value is -1 in arrays and NULL in SQL; only the\n"
        "marked columns may be unknown.\n"
    )
    return "Events", head + "".join(_record_type(table) for table in layout.EVENT_TABLES)


_ENUMERATIONS = (
    names.Op,
    names.Datatype,
    names.CollectiveFlag,
    names.OffCpuFlag,
    names.Direction,
    names.HostMemory,
    names.MemoryKind,
)


def _record_type(table: layout.Table) -> str:
    rows = [
        (f"`{f.name}`", _format(f.format), "yes" if f.may_be_unknown else "", f.meaning) for f in table.fields
    ]
    listed = _table(("column", "type", "may be unknown", "meaning"), rows)
    return f"\n## {table.name}\n\n{table.meaning}\n\n{listed}"


def _format(format_: str) -> str:
    if format_.startswith("S"):
        return f"text, {format_[1:]} bytes"
    if format_.startswith("("):
        return f"{names.N_CATEGORIES} x {FORMATS[format_.rpartition(')')[2]]}"
    return FORMATS[format_]


def _categories() -> tuple[str, str]:
    head = inspect.cleandoc(names.Category.__doc__ or "") + "\n\n"
    meanings = _comments(names.Category)
    rows = [
        (str(int(c)), f"`{c.name.lower()}`", meanings.get(c.name, ""), _leads_to(c)) for c in names.Category
    ]
    return "Categories of the ledger", head + _table(("number", "name", "the process is", "leads to"), rows)


def _leads_to(category: names.Category) -> str:
    return ", ".join(f"[{c.name}](causes.md)" for c in _registry.all_causes() if category in c.categories)


def _causes() -> tuple[str, str]:
    head = (
        "The excess of a late rank over its peers is divided among the causes. A cause claims the excess in its\n"
        "[categories](categories.md), some causes only if counts of calls agree. Causes without categories are\n"
        "found by other evidence.\n\n"
    )
    rows = [
        (f"`{c.name}`", _module_doc(c), ", ".join(k.name.lower() for k in c.categories))
        for c in _registry.all_causes()
    ]
    return "Causes", head + _table(("cause", "meaning", "categories it claims"), rows)


def _module_doc(cause: _registry.Cause) -> str:
    """The first paragraph of the docstring of a cause's file."""
    module = importlib.import_module(f"stallscope.diagnose.causes.{cause.name}")
    return (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")


def _numbers() -> tuple[str, str]:
    sections = []
    for enumeration in _ENUMERATIONS:
        meanings = _comments(enumeration)
        rows = [(str(int(m)), f"`{m.name}`", meanings.get(str(m.name), "")) for m in enumeration]
        about = inspect.cleandoc(enumeration.__doc__ or "")
        sections.append(f"## {enumeration.__name__}\n\n{about}\n\n{_table(('number', 'name', ''), rows)}")
    return "Numbers in the events", "\n".join(sections)


def _thresholds() -> tuple[str, str]:
    head = (
        "The thresholds of the diagnosis, with their reasons. Thresholds that a user may want to change are also\n"
        "[settings](settings.md). A reason that begins with dots continues the reason above it. Constants that a\n"
        "single step of the diagnosis uses are at the top of its module.\n\n"
    )
    reasons = _attribute_docs(thresholds.Thresholds)
    rows = [
        (f"`{f.name}`", f"{f.default:,}", " ".join(reasons[f.name].split()))
        for f in dataclasses.fields(thresholds.Thresholds)
    ]
    return "Thresholds", head + _table(("name", "value", "reason"), rows)


def _errors() -> tuple[str, str]:
    head = (
        "Every error ends a command with one line on standard error and one of these exit codes. `explain` without\n"
        "an error exits with its answer: 0 healthy, 20 found, 21 inconclusive.\n\n"
    )
    rows = [
        (f"`{e.__name__}`", str(e.exit_code), str(e.http_status), _first_line(e))
        for e in _tree(StallscopeError)
    ]
    return "Errors", head + _table(("error", "exit code", "HTTP status", "meaning"), rows)


def _tree(root: type[StallscopeError]) -> Iterable[type[StallscopeError]]:
    yield root
    for leaf in root.__subclasses__():
        if leaf.__module__ == errors.__name__:
            yield from _tree(leaf)


def _sql() -> tuple[str, str]:
    head = (
        "The tables and functions of `stallscope query`. The tables of events have the columns of\n"
        "[events](events.md) after an `id`; `stallscope query --schema` prints all columns of a trace. The\n"
        "dialect is SQLite's.\n\n"
    )
    listed = [table.name for table in layout.EVENT_TABLES] + list(trace_schema.OTHERS)
    listed += [view.name for view in VIEWS]
    tables = [(f"`{name}`", trace_schema.about(name)) for name in listed]
    functions = [(f"`{name}`", meaning) for name, meaning in FUNCTIONS.items()]
    return "SQL on a trace", (
        f"{head}{_table(('table', 'a row is'), tables)}\n"
        f"## Functions\n\n{_table(('function', 'meaning'), functions)}"
    )


def _metrics() -> tuple[str, str]:
    head = (
        "The metrics of `trace --otlp` and `trace --prometheus`. Names that begin with `hw.` and `system.` follow\n"
        "OpenTelemetry's semantic conventions. Counters and histograms are cumulative from their start time: the\n"
        "start of the agent (`system.*`: the boot of the machine). In Prometheus each attribute is a label with\n"
        "underscores instead of dots, and each series has the label `node`. A metric has at most\n"
        f"{MAX_SERIES:,} series; one more series counts the rest.\n\n"
    )
    rows = [
        (
            f"`{m.name}`",
            f"`{m.prometheus_name}`",
            str(m.kind),
            f"`{m.unit}`",
            ", ".join(f"`{name}`" for name in m.attributes),
            m.meaning,
        )
        for m in METRICS
    ]
    spans = (
        "\n## Incidents\n\nWith `--otlp`, a closed incident is sent as a span with its start and end, the error\n"
        "status and the summary. Trace id and span id are derived from the incident's id, so a repeated span has the\n"
        "same ids.\n\n"
    )
    attributes = [(f"`{name}`", meaning) for name, meaning in ATTRIBUTES.items()]
    spans += _table(("attribute", "meaning"), attributes)
    heads = ("OTLP", "Prometheus", "type", "unit", "attributes", "meaning")
    return "Metrics", head + _table(heads, rows) + spans


def _tools() -> tuple[str, str]:
    head = (
        "The tools that an assistant can call over MCP. For one machine: `stallscope mcp` on standard input and\n"
        "output, or `/mcp` of `stallscope serve`. For a cluster: `/mcp` of the hub or `stallscope hub mcp`; HTTP\n"
        "and `stallscope ask` offer the same tools. All tools are read-only.\n"
    )
    of_node = "".join(_tool(tool) for tool in mcp_server.tools().values())
    of_hub = "".join(_tool(tool) for tool in collected(hub_tools).values())
    return "Tools", f"{head}\n## Tools of a node\n{of_node}\n## Tools of a hub\n{of_hub}"


def _tool(tool: Tool[Any]) -> str:
    schema_ = tool.input_schema
    rows = [
        (
            f"`{name}`",
            _type(argument),
            _default_text(argument.get("default")),
            argument.get("description", ""),
        )
        for name, argument in schema_.get("properties", {}).items()
    ]
    listed = f"\n{_table(('argument', 'type', 'default', 'meaning'), rows)}" if rows else ""
    return f"\n### {tool.name}\n\n{tool.description}\n{listed}"


def _type(argument: dict[str, Any]) -> str:
    """The type of an argument in words."""
    kinds = [argument, *argument.get("anyOf", [])]
    words = []
    for kind in kinds:
        if "enum" in kind:
            words.append(", ".join(f"`{value}`" for value in kind["enum"]))
        elif "type" in kind and kind["type"] != "null":
            words.append(str(kind["type"]))
    return " or ".join(words)


def _default_text(default: object) -> str:
    return "" if default in (None, "") else f"`{default}`"


REFERENCE: dict[str, Callable[[], tuple[str, str]]] = {
    "commands": _commands,
    "settings": _settings,
    "sql": _sql,
    "metrics": _metrics,
    "tools": _tools,
    "events": _events,
    "categories": _categories,
    "numbers": _numbers,
    "causes": _causes,
    "thresholds": _thresholds,
    "errors": _errors,
}


def _contents(written: dict[str, str]) -> str:
    """Links to the pages of the reference."""
    return "".join(
        f"- [{text.splitlines()[0].removeprefix('# ')}]({Path(path).name})\n"
        for path, text in written.items()
    )


def _decisions(folder: Path) -> str:
    """Links to the decisions, by title."""
    decisions = sorted(p for p in folder.glob("*.md") if p.name != "README.md")
    listed = [f"- [{_title(path)}]({path.name})\n" for path in decisions]
    return "One page for each decision that a newcomer would question.\n\n" + "".join(listed)


def _title(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# ").strip()


def _page(title: str, body: str) -> str:
    return f"# {title}\n\n{NOTE}\n\n{body.rstrip()}\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _first_line(thing: type) -> str:
    return inspect.cleandoc(thing.__doc__ or "").splitlines()[0]


def _comments(enumeration: type[Enum]) -> dict[str, str]:
    """The comment after each member of an enumeration, which states its meaning."""
    comments = {}
    name = ""
    source = inspect.getsource(enumeration)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not token.line[: token.start[1]].strip():
            name = token.string
        elif token.type == tokenize.COMMENT and token.line.strip().startswith(name):
            comments[name] = token.string.removeprefix("#").strip()
    return comments


def _attribute_docs(owner: type) -> dict[str, str]:
    """The text below each attribute of a class."""
    definition = ast.parse(inspect.getsource(owner)).body[0]
    assert isinstance(definition, ast.ClassDef)
    return {
        attribute.target.id: text.value.value
        for attribute, text in itertools.pairwise(definition.body)
        if isinstance(attribute, ast.AnnAssign)
        and isinstance(attribute.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def main() -> None:
    """Write the pages, and remove pages of the reference that no function writes."""
    current = pages()
    for path in set(DOCS.glob("reference/*.md")) - {DOCS / name for name in current}:
        path.unlink()
    for name, text in current.items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        sys.stdout.write(f"docs/{name}\n")


if __name__ == "__main__":
    main()
