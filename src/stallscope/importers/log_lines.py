"""Lines of launchers' logs: their writer, their time, and the text after all prefixes.

Prefixes of torchrun ([default0]:, [rank3]:), c10's logger ([rank3]:[E709 17:05:38.16 File.cpp:632]), Ray
((WorkerDict pid=17, ip=10.0.0.2)), engines ((VllmWorker rank=3 pid=17), (Worker_TP3 pid=17), SGLang's [TIME TP3]),
srun --label (3: ), mpirun --tag-output ([1,3]<stderr>:), kubectl and stern ([pod/train-3/main], train-3 main), and
time stamps of common styles.
"""

import calendar
import re
from dataclasses import dataclass
from datetime import UTC, datetime

_TIME = re.compile(
    r"^\s*\[?(?P<date>\d{4}[-/]\d\d[-/]\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r"(?:Z|[+-]\d\d:?\d\d)?\]?[ :\t]*"
)
_GLOG = re.compile(
    r"\[?[IWEF](?P<month>\d{1,2})(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)(?:\.(?P<part>\d{1,9}))?"
)
_SYSLOG = re.compile(
    r"^(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<day>\d+) (?P<time>\d\d:\d\d:\d\d) "
)
_MONTHS = {name: i for i, name in enumerate(calendar.month_abbr) if name}

_RANK = re.compile(r"\[rank ?(\d{1,7})\]:?|\[Rank (\d{1,7})\]|\bRank (\d{1,7})\]|\brank[=:] ?(\d{1,7})\b")
_PREFIXES = (
    re.compile(r"^\[rank ?(?P<rank>\d{1,7})\]: ?"),
    re.compile(r"^\[\d+,(?P<rank>\d{1,7})\]<std(?:out|err|diag)>: ?"),
    re.compile(r"^\[(?P<local>[A-Za-z_]+\d{1,4})\]:? ?"),
    re.compile(r"^\((?P<actor>[\w.]+ (?:rank=\d+ )?pid=\d+(?:, ip=[\w.:-]+)?)\) ?"),
    re.compile(r"^\[pod/(?P<pod>[\w.-]+)/[\w.-]+\] ?"),
    re.compile(r"^(?P<worker>(?:(?:DP|PP|TP|EP)\d{1,6} ?){1,4})\] ?"),
    re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\] ?"),
    re.compile(r"^ {0,6}(?P<task>\d{1,7}): "),
)


@dataclass(frozen=True)
class Line:
    """text: without prefixes. rank: of the job, or None. source: other names of the writer. ts_ns: 0 where unknown."""

    text: str
    rank: int | None
    source: str
    ts_ns: int


def parse(line: str, *, has_labels: bool) -> Line:
    """One line. has_labels: leading numbers are task numbers of srun --label."""
    ts_ns = 0
    if match := _TIME.match(line):
        ts_ns = wall_ns(match["date"].replace("/", "-"), match["time"], match["part"])
        line = line[match.end() :]
    rank: int | None = None
    source = ""
    for _ in range(4):
        prefix = next((m for p in _PREFIXES if (m := p.match(line))), None)
        if prefix is None or (prefix.lastgroup == "task" and not has_labels):
            break
        value = prefix[prefix.lastgroup or 0]
        if prefix.lastgroup in ("rank", "task"):
            rank = int(value) if prefix.lastgroup == "rank" or rank is None else rank
        elif prefix.lastgroup:
            source += f"{value} "
            if prefix.lastgroup in ("actor", "worker") and rank is None:
                rank = _worker_rank(value)
        line = line[prefix.end() :]
        if not ts_ns and (match := _TIME.match(line)):
            ts_ns = wall_ns(match["date"].replace("/", "-"), match["time"], match["part"])
            line = line[match.end() :]
    if rank is None and (match := _RANK.search(line[:400])):
        rank = int(next(group for group in match.groups() if group))
    return Line(line, rank, source, ts_ns or _other_time(line))


def _worker_rank(words: str) -> int | None:
    """The rank of an engine's worker: stated, or its number in the tensor-parallel group if other groups have one."""
    if match := re.search(r"\brank=(\d{1,7})\b", words):
        return int(match[1])
    parts = dict(re.findall(r"(?<![A-Za-z])(DP|PP|TP)(\d{1,6})(?!\d)", words))
    return int(parts["TP"]) if "TP" in parts and parts.get("DP", "0") == parts.get("PP", "0") == "0" else None


def _other_time(line: str) -> int:
    if match := _GLOG.search(line[:80]):
        return wall_ns(f"0001-{int(match['month']):02d}-{match['day']}", match["time"], match["part"])
    if match := _SYSLOG.match(line):
        return wall_ns(f"0001-{_MONTHS[match['month']]:02d}-{int(match['day']):02d}", match["time"], None)
    return 0


def wall_ns(date: str, time: str, part: str | None = None) -> int:
    """Wall time as UTC. A line without a year is of the current year, or of the last if it would be in the future."""
    try:
        moment = datetime.fromisoformat(f"{date}T{time}").replace(tzinfo=UTC)
        if moment.year == 1:
            now = datetime.now(UTC)
            moment = moment.replace(year=now.year)
            if (moment - now).days > 1:
                moment = moment.replace(year=now.year - 1)
    except ValueError:
        return 0
    fraction = int((part or "0").ljust(9, "0"))
    return int(moment.timestamp()) * 10**9 + fraction


_LABEL = re.compile(r"^ {0,6}\d{1,7}: ")


def has_task_labels(lines: list[str]) -> bool:
    """Whether most lines begin with the task number that srun --label writes."""
    labelled = sum(bool(_LABEL.match(line)) for line in lines)
    return len(lines) >= 2 and labelled >= 0.8 * len(lines)
