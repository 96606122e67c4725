"""Optional parts of the `explain` report: tables by process and by container, and the chains of slow calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.diagnose import Report
    from stallscope.diagnose.views import Chain, ProcessRow
    from stallscope.events.trace import Trace


@dataclass(frozen=True)
class Details:
    """The requested parts."""

    by_process: bool = False
    by_container: bool = False
    chains: bool = False

    def text(self, trace: Trace, report: Report) -> str:
        """The parts as plain text below the report; empty if none is requested."""
        rows = self._rows(trace, report)
        parts = []
        if self.by_process:
            parts.append(_processes(rows))
        if self.by_container:
            parts.append(_containers(rows))
        if self.chains:
            parts.append(_chains(trace, report))
        return "".join(f"\n{part}" for part in parts)

    def data(self, trace: Trace, report: Report) -> dict[str, Any]:
        """The parts as data within the report's JSON."""
        from stallscope.diagnose.views import as_rows, chains, container_rows

        out: dict[str, Any] = {}
        rows = self._rows(trace, report)
        if self.by_process:
            out["processes"] = as_rows(rows)
        if self.by_container:
            out["containers"] = as_rows(container_rows(rows))
        if self.chains:
            out["chains"] = [_chain(chain) for chain in chains(trace)]
        return out

    def _rows(self, trace: Trace, report: Report) -> list[ProcessRow]:
        """The activity of each process, if a requested part needs it."""
        from stallscope.diagnose.views import process_rows

        return process_rows(trace, report) if self.by_process or self.by_container else []


def _processes(processes: list[ProcessRow]) -> str:
    from stallscope.commands.answer import plain
    from stallscope.query.sql import Answer

    names = ("rank", "node", "process", "rounds", "late ms", "at most", "part", "where the time went")
    rows: list[tuple[object, ...]] = [
        (
            row.rank,
            row.node,
            f"{row.name} {row.pid}".strip(),
            row.n_rounds,
            _ms(row.late_ms),
            _ms(row.worst_ms),
            row.part,
            _shares(row.shares),
        )
        for row in processes
    ]
    return f"By process\n{plain(Answer(names, rows))}"


def _containers(containers: list[ProcessRow]) -> str:
    from stallscope.commands.answer import plain
    from stallscope.diagnose.views import container_rows
    from stallscope.query.sql import Answer

    names = ("container", "node", "ranks", "processes", "at most ms", "part", "where the time went")
    rows: list[tuple[object, ...]] = [
        (
            row.container or "(none)",
            row.node,
            ", ".join(map(str, row.ranks)),
            row.n_processes,
            _ms(row.worst_ms),
            row.part,
            _shares(row.shares),
        )
        for row in container_rows(containers)
    ]
    return f"By container\n{plain(Answer(names, rows))}"


def _chains(trace: Trace, report: Report) -> str:
    """The longest slow call of each function in each process, and the number of its slow calls."""
    from stallscope.diagnose.views import chains

    groups: dict[tuple[str, int, str], list[Chain]] = {}
    for chain in chains(trace):
        groups.setdefault((chain.node, chain.pid, chain.function or chain.op.name.lower()), []).append(chain)
    if not groups:
        return "Slow calls\nno call took ten times its typical duration\n"
    return "Slow calls and their causes\n" + "".join(
        f"{_chain_line(name, group, report)}\n" for (_, _, name), group in groups.items()
    )


def _chain_line(name: str, group: list[Chain], report: Report) -> str:
    longest = group[0]
    often = f"{len(group)} slow calls, the longest" if len(group) > 1 else "one call of"
    return (
        f"{name} of {longest.node} {longest.pid}/{longest.tid}: {often} {longest.duration_ns / 1e6:.1f} ms, "
        f"{longest.duration_ns / max(longest.usual_ns, 1):.0f} times the typical {longest.usual_ns / 1e6:.2f} ms; "
        f"{_held(longest, report)}"
    )


def _held(chain: Chain, report: Report) -> str:
    from stallscope.events.names import Op

    if chain.links:
        return ", ".join(
            f"{link.share:.0%} {link.category.name.lower()}{f' by {link.by}' if link.by else ''}"
            for link in chain.links
        )
    culprits = sorted({rank for verdict in report.verdicts for rank in verdict.ranks})
    if chain.op == Op.SYNC and culprits:
        return f"its thread was not blocked: it waited, and rank {', '.join(map(str, culprits))} is late"
    return "its thread was not blocked: the call itself took this long"


def _chain(chain: Chain) -> dict[str, Any]:
    from stallscope.diagnose import wall_text

    return {
        "function": chain.function or chain.op.name.lower(),
        "node": chain.node,
        "pid": chain.pid,
        "tid": chain.tid,
        "at": wall_text(chain.wall_ns),
        "duration_ms": round(chain.duration_ns / 1e6, 3),
        "usual_ms": round(chain.usual_ns / 1e6, 3),
        "explained": round(chain.explained, 3),
        "held_by": [
            {"category": link.category.name.lower(), "share": round(link.share, 3), "by": link.by or None}
            for link in chain.links
        ],
    }


def _shares(shares: Mapping[str, float]) -> str:
    texts: Sequence[str] = [f"{name} {share:.0%}" for name, share in list(shares.items())[:4]]
    return ", ".join(texts)


def _ms(value: float | None) -> float | None:
    """Rounded to one decimal, never a negative zero."""
    return None if value is None else round(value, 1) + 0.0
