"""Compares the reports of two revisions on recordings, public data sets and cases: a refactoring changes only wording.

    bench/bench_report_changes.py [BEFORE..AFTER ...] [--data ../shared] [--out FOLDER]

Without revisions: the move of the flat folder `diagnose` into packages, and the renames for unique base names. Each
revision imports and explains each input with its own code, from a temporary work tree. For each pair of revisions: the
inputs whose facts differ, with both values, and the inputs that differ in wording or in evidence only. Facts: answer,
kinds, ranks, victims, causes with shares, lateness, period, cost and counts. Renamed fields are mapped. --out keeps the
reports.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import report

ROOT = Path(__file__).resolve().parents[1]
_MOVES = ("ff53b947~1..31d86dee", "e6c8f4d4~3..e6c8f4d4")
_RENAMED = {"looked_at": "examined"}
_FACTS = (
    "kind",
    "ranks",
    "victims",
    "late_ms",
    "period_steps",
    "n_incidents",
    "n_late_rounds",
    "confidence",
    "cost",
)
_RUN = "from stallscope.cli import main; main()"


def inputs(data: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of each input."""
    for folder in ("recordings", "public/flight-recorder", "cases"):
        for path in sorted((data / folder).iterdir()):
            if path.is_dir() and path.name not in ("traces", "other-formats"):
                yield f"{folder}/{path.name}", path
    for pattern in ("public/node-databases/*.db", "public/pipeline-traces/*.parquet", "cases/traces/*.db"):
        for path in sorted(data.glob(pattern)):
            yield str(path.relative_to(data)), path


@contextmanager
def work_tree(revision: str) -> Iterator[Path]:
    """The sources of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", path, revision], cwd=ROOT, check=True)
        try:
            yield path / "src"
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", path], cwd=ROOT, check=True)


def report_of(source: Path, path: Path) -> dict[str, Any]:
    """The JSON of `explain`, or the error of a revision that cannot read the input."""
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONNOUSERSITE": "1"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _RUN, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    with tempfile.TemporaryDirectory() as folder:
        db = path
        if path.is_dir() or path.suffix == ".parquet" or "node-databases" in path.parts:
            db = Path(folder) / "trace.db"
            imported = run("import", path, "--db", db)
            if imported.returncode:
                return {"error": imported.stderr.strip()[-300:]}
        explained = run("explain", "--db", db, "--json")
        try:
            report: dict[str, Any] = json.loads(explained.stdout.replace(str(source), "src"))
        except ValueError:
            return {"error": explained.stderr.strip()[-300:]}
        return report


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """The parts of a report that a refactoring must not change."""
    if "error" in report:
        return report
    report = {_RENAMED.get(name, name): value for name, value in report.items()}
    return {
        "healthy": report["healthy"],
        "n_benign": len(report["benign"]),
        "verdicts": [
            {name: verdict.get(name) for name in _FACTS}
            | {"causes": [(cause["cause"], cause["share"]) for cause in verdict["causes"]]}
            for verdict in report["verdicts"]
        ],
    }


def without_nulls(value: Any) -> Any:
    """The value without null members of objects."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def comparison(before: str, after: str, data: Path, out: Path | None) -> dict[str, Any]:
    """The inputs whose reports differ between two revisions."""
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in inputs(data)}
    for revision in (before, after):
        with work_tree(revision) as source:
            for name, path in inputs(data):
                reports[name].append(report_of(source, path))
        if out:
            out.mkdir(parents=True, exist_ok=True)
            kept = {name: both[-1] for name, both in reports.items()}
            (out / f"{revision.replace('/', '_')}.json").write_text(json.dumps(kept, indent=1))
    changed = {
        name: {"before": facts(first), "after": facts(second)}
        for name, (first, second) in reports.items()
        if facts(first) != facts(second)
    }
    worded = [
        name
        for name, (first, second) in reports.items()
        if name not in changed and without_nulls(first) != without_nulls(second)
    ]
    return {
        "before": before,
        "after": after,
        "n_inputs": len(reports),
        "n_same": len(reports) - len(changed) - len(worded),
        "only_wording_or_evidence": worded,
        "facts_changed": changed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revisions", nargs="*", default=_MOVES, metavar="BEFORE..AFTER")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    pairs = [pair.split("..") for pair in chosen.revisions]
    compared = [comparison(before, after, chosen.data, chosen.out) for before, after in pairs]
    report("report_changes", {"comparisons": compared})


if __name__ == "__main__":
    main()
