"""Sets the version of the next release in every file that states it, and dates its section in CHANGELOG.md.

python setup/set_version.py 0.2.0

Fails without a change if the version is not MAJOR.MINOR.PATCH or not newer, or if the CHANGELOG has nothing to release.
`make version` runs this file and renders the manifests of deploy/kubernetes. docs/release.md lists the steps.
"""

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
STATED = {
    "src/stallscope/__init__.py": r'^__version__ = "([\d.]+)"',
    "deploy/helm/stallscope/Chart.yaml": r'^(?:version|appVersion): "?([\d.]+)"?$',
    "deploy/compose/compose.yaml": r"stallscope-(?:agent|hub):([\d.]+)$",
    "docs/install.md": r"stallscope-(?:agent|hub):([\d.]+)",
}
"""The hand-written files that state the version, each with a pattern whose group is the version."""

_UNRELEASED = "## Unreleased\n"


def stated(root: Path = ROOT) -> dict[str, set[str]]:
    """The versions that each file states."""
    return {name: set(re.findall(pattern, _text(root / name), re.M)) for name, pattern in STATED.items()}


def released(changelog: str, version: str, date: str) -> str:
    """The changelog with the unreleased changes as a version. Raises ValueError if there are none."""
    before, found, after = changelog.partition(_UNRELEASED)
    changes = after.split("\n## ", 1)[0]
    if not found or not changes.strip():
        raise ValueError(
            "CHANGELOG.md: no changes below '## Unreleased'; describe the changes of this version first"
        )
    return f"{before}{_UNRELEASED}\n## {version} ({date})\n{after}"


def set_version(version: str, root: Path = ROOT, date: str = "") -> None:
    """Writes the version into all files. Raises ValueError, and changes nothing, for an unusable version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"{version!r} is not a version; give MAJOR.MINOR.PATCH")
    (old,) = stated(root)["src/stallscope/__init__.py"]
    if _numbers(version) <= _numbers(old):
        raise ValueError(f"{version} is not newer than {old}; give a higher version")
    log = root / "CHANGELOG.md"
    texts = {log: released(_text(log), version, date or f"{datetime.now(UTC):%Y-%m-%d}")}
    for name, pattern in STATED.items():
        texts[root / name] = re.sub(
            pattern, lambda m: m[0].replace(m[1], version), _text(root / name), flags=re.M
        )
    for path, text in texts.items():
        path.write_text(text)


def _text(path: Path) -> str:
    return path.read_text()


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python setup/set_version.py MAJOR.MINOR.PATCH")
    try:
        set_version(sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
