"""The test matrix: the combinations of hardware and software on which results were recorded, from bench/results."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"

_COLUMNS = ("GPU", "driver", "CUDA", "NCCL", "kernel", "Python", "architecture")
_ASKED: dict[str, tuple[str, ...]] = {
    "GPU": ("A100", "H100", "H200", "B200", "L40S", "MI300X"),
    "driver": ("535", "550", "570", "580"),
    "CUDA": ("12.4", "12.8", "13.0"),
    "NCCL": ("2.21", "2.25", "2.27", "2.28"),
    "kernel": ("5.15", "6.1", "6.6", "6.8", "6.12", "6.18"),
    "Python": ("3.11", "3.12", "3.13", "3.14"),
    "architecture": ("x86_64", "aarch64"),
}
"""The values that users ask for, by column."""

Row = tuple[str, ...]


def machines(value: Any) -> Iterator[dict[str, Any]]:
    """Every description of a machine in a result."""
    if isinstance(value, dict):
        if isinstance(value.get("machine"), dict):
            yield value["machine"]
        for each in value.values():
            yield from machines(each)
    elif isinstance(value, list):
        for each in value:
            yield from machines(each)


def row(machine: dict[str, Any]) -> Row:
    """One combination; an empty text where the result does not state the value."""
    gpus = [str(gpu) for gpu in machine.get("gpus", []) if gpu]
    model, _, driver = (gpus[0] if gpus else "").partition(", ")
    torch, nccl = machine.get("torch_nccl") or ("", "")  # as PyTorch reports both: 2.11.0+cu130, 2.28.9
    cuda = re.search(r"\+cu(\d+)(\d)$", torch)
    return (
        model.removeprefix("NVIDIA "),
        driver,
        f"{cuda[1]}.{cuda[2]}" if cuda else "",
        nccl,
        re.match(r"[\d.]*", str(machine.get("kernel", "")))[0].rstrip("."),  # type: ignore[index]
        str(machine.get("python", "")),
        str(machine.get("machine", "x86_64")),
    )


def rows() -> dict[Row, list[str]]:
    """The names of the results, by combination."""
    found: dict[Row, list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        for machine in machines(json.loads(path.read_text())):
            names = found.setdefault(row(machine), [])
            if path.stem not in names:
                names.append(path.stem)
    return found


def page() -> tuple[str, str]:
    """Title and text of the page."""
    ran = rows()
    lines = [
        "Generated from the machines that `bench/results` names. A result on a combination means that stallscope",
        "traced or read a job there. An empty cell means that the result does not state the value. An emulated GPU is",
        "not counted. `make prove-kernels` also traces an emulated job on the kernels of Debian 12 and 13 in virtual",
        "machines.",
        "",
        f"| {' | '.join(_COLUMNS)} | results |",
        f"| {' | '.join('---' for _ in (*_COLUMNS, ''))} |",
    ]
    for combination, names in sorted(ran.items(), key=lambda item: item[0], reverse=True):
        lines.append(f"| {' | '.join(cell or ' ' for cell in combination)} | {', '.join(names)} |")
    lines += ["", "## By value", "", "| | run | untested |", "| --- | --- | --- |"]
    for number, name in enumerate(_COLUMNS):
        values = {combination[number] for combination in ran}
        run = [asked for asked in _ASKED[name] if any(_is(asked, value) for value in values)]
        untested = [asked for asked in _ASKED[name] if asked not in run]
        lines.append(f"| {name} | {', '.join(run) or 'none'} | {', '.join(untested) or 'none'} |")
    return "Test matrix", "\n".join(lines) + "\n"


def _is(asked: str, value: str) -> bool:
    """Whether a recorded value is the value that users ask for: equal, or a later part of the same version."""
    return value == asked or value.startswith(f"{asked}.") or value.partition(" ")[0] == asked


def artefacts() -> str:
    """The table of sizes and times to the first verdict, from the last `make prove-install`."""
    result = json.loads((RESULTS / "install.json").read_text())
    lines = ["| artefact | size | first verdict, first run included |", "| --- | --- | --- |"]
    for each in result["artefacts"]:
        seconds = f"{each['first_verdict_s']} s" if "first_verdict_s" in each else ""
        lines.append(f"| {each['artefact']} | {each['bytes'] / 1e6:,.1f} MB | {seconds} |")
    origin = f"commit {result['commit']}, {result['python']}, on 2 shared CPUs"
    if loads := [each["load"] for each in result["artefacts"] if "load" in each]:
        origin += f" with a load of {min(loads):.0f} to {max(loads):.0f}"
    tail = f"Sizes, and times printed by `setup/prove_install.sh`, at {origin}."
    return "\n".join([*lines, "", tail]) + "\n"
