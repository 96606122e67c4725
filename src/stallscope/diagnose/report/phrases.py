"""Phrases that sentences and rows of a report share: ranks, times, names, frames and stacks."""

from stallscope.diagnose.report.verdict import Verdict

_MAX_FRAMES = 6


def identity_text(verdict: Verdict) -> str:
    """Host and process id of a rank, in parentheses, where they are known."""
    host = [f"host {verdict.nodes[0]}"] if len(verdict.nodes) == 1 and verdict.nodes[0] else []
    pid = [f"pid {verdict.pids[0]}"] if len(verdict.pids) == 1 else []
    return f" ({', '.join(host + pid)})" if host or pid else ""


def short_frame(frame: str) -> str:
    """A frame without the folders of its file."""
    line, _, function = frame.rpartition(" ")
    return f"{line.rpartition('/')[2]} {function}"


def stack_text(frames: list[str]) -> str:
    """A stack in one line, innermost frame first, without the interpreter's own frames."""
    shown = [frame for frame in frames if not frame.startswith("<frozen ")] or frames
    more = f" <- {len(shown) - _MAX_FRAMES} more" if len(shown) > _MAX_FRAMES else ""
    return " <- ".join(short_frame(frame) for frame in shown[:_MAX_FRAMES]) + more


def ranks_text(ranks: list[int]) -> str:
    """Up to 12 ranks: `rank 3`, `ranks 3, 4`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:12])
    return f"ranks {shown}{f' and {len(ranks) - 12} more' if len(ranks) > 12 else ''}"


def ms_text(value: float) -> str:
    """A time in ms, or in s from 1,000 ms."""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def name_text(name: str) -> str:
    """A field's name as words, without the prefix of counts."""
    return name.replace("n_", "", 1).replace("_", " ") if name.startswith("n_") else name.replace("_", " ")


def value_text(value: object) -> str:
    """A value of the evidence as words."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
