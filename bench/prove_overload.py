"""A hub under 1.5 times the load that it sustains: memory stays flat, no acknowledged row is lost, all spools drain.

The hub is the real command with a memory limit and with the diagnosis on. Four agents' senders, with their spools on
disk, offer the rows of one job. The sustained load is measured first: `stress` at full speed. After the duration the
agents offer nothing more and send their spools; at the end each row is in the hub once.

python bench/prove_overload.py [--duration S] [--memory BYTES]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import report
from served_hub import ServedHub, served_hub, stress

from stallscope.events.layout import Array
from stallscope.exporters.hub_channel import HubChannel, Target
from stallscope.exporters.hub_sender import HubSender
from stallscope.exporters.spool import Spool
from stallscope.stress import load
from stallscope.stress.load import Job

N_AGENTS, RANKS_EACH = 4, 64
OVERLOAD = 1.5
CALIBRATION_S = 15.0
TICK_S, SAMPLE_S = 0.25, 2.0
MAX_ROWS_OFFERED = 60_000
"""Of an agent at once: its sender holds 64 MB of rows until they are on disk, and drops further rows."""

PROGRESS_S = 60.0
ROUNDS_A_QUESTION = 25_000
SPOOL_BYTES = 20 << 30
MIN_PATIENCE_S, DRAIN_SHARE = 600.0, 3.0
"""The spools must drain within this multiple of the duration."""

MARGIN_NS = 10_000_000_000
MAX_GROWTH = 1.15
"""Memory is flat if the median of the last third of the overload exceeds the median of the middle third by at most
this.
"""


@dataclass(frozen=True)
class Offered:
    """The rows that the agents offered: rounds of all ranks. memory_mb: the hub's memory every SAMPLE_S."""

    agents: list["Agent"]
    first_round: int
    n_rounds: int
    seconds: float
    memory_mb: list[int]

    @property
    def n_rows(self) -> int:
        """Offered rows."""
        return self.n_rounds * N_AGENTS * RANKS_EACH


@dataclass
class Agent:
    """An agent's connection to the hub, and its part of the job."""

    sender: HubSender
    spool: Spool
    job: Job

    def offer(self, first_round: int, n_rounds: int, origin_round: int) -> None:
        """Offer some rounds."""
        rows: Array = load.collectives(self.job, first_round, n_rounds, origin_round=origin_round)
        self.sender.offer({"collectives": rows})


def main() -> None:
    """Measure, report, and fail if anything is not as stated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--duration", type=float, default=1800.0)
    parser.add_argument("--memory", type=int, default=2_000_000_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = proved(Path(name), duration_s=asked.duration, memory_bytes=asked.memory)
    report("overload", result)
    sys.exit(
        0
        if result["lost_rows"] == result["rows_twice"] == result["dropped_rows"] == 0 and result["is_flat"]
        else 1
    )


def proved(folder: Path, *, duration_s: float, memory_bytes: int) -> dict[str, Any]:
    """The numbers of one run."""
    with served_hub(folder, STALLSCOPE_HUB_MEMORY_BYTES=str(memory_bytes)) as hub:
        sustained = sustained_rows_per_s(hub)
        before = hub.numbers()
        offered = overload(hub, folder, sustained * OVERLOAD, duration_s)
        drain_s = drained_s(hub, offered, max(MIN_PATIENCE_S, DRAIN_SHARE * duration_s))
        memory_mb_after = hub.memory_mb()
        stored = stored_rounds(hub, offered)
        numbers = hub.numbers()
        for agent in offered.agents:
            agent.sender.close(5.0)
    n_rounds, samples = offered.n_rounds, offered.memory_mb
    counts = [n for _, n, *_ in stored] + [0] * (N_AGENTS * RANKS_EACH - len(stored))
    third = len(samples) // 3
    growth = statistics.median(samples[2 * third :]) / statistics.median(samples[third : 2 * third])
    return {
        "duration_s": round(duration_s),
        "memory_setting_mb": round(memory_bytes / 1e6),
        "sustained_rows_per_s": round(sustained),
        "offered_rows_per_s": round(offered.n_rows / offered.seconds),
        "offered_to_sustained": round(offered.n_rows / offered.seconds / sustained, 2),
        "offered_rows": offered.n_rows,
        "stored_rows": sum(counts),
        "lost_rows": sum(max(n_rounds - n, 0) for n in counts),
        "rows_twice": sum(max(n - n_rounds, 0) for n in counts),
        "ranks_with_other_rounds": sum(not has_each_round(*row[1:]) for row in stored),
        "dropped_rows": sum(agent.sender.n_not_sent for agent in offered.agents),
        "refused_requests": round(counted(numbers, "requests_refused") - counted(before, "requests_refused")),
        "rows_left_out_of_the_diagnosis": round(counted(numbers, "diagnosis_rows_left_out")),
        "drain_s": round(drain_s, 1),
        "memory_mb_median": round(statistics.median(samples)),
        "memory_mb_max": max(samples),
        "memory_mb_after": memory_mb_after,
        "memory_growth": round(growth, 3),
        "is_flat": growth <= MAX_GROWTH,
    }


def counted(numbers: dict[str, float], name: str) -> float:
    """A counter; the hub publishes it once it is above 0."""
    return numbers.get(f"{name}_total", 0.0)


def stored_rounds(hub: ServedHub, offered: Offered) -> list[tuple[int, int, int, int, float]]:
    """For each rank: its number of rows, its first and last round, and the sum of its rounds.

    Several short questions: an answer may not take longer than the hub's time limit. The times select the files.
    """
    interval_ns = offered.agents[0].job.interval_ns
    where = "FROM collectives WHERE cluster_id = 'overload'"
    first, end = offered.first_round, offered.first_round + offered.n_rounds
    by_rank: dict[int, list[list[Any]]] = {}
    for begin in range(first, end, ROUNDS_A_QUESTION):
        for rank, *numbers in hub.all_rows(
            f"SELECT rank, count(*), min(seq), max(seq), sum(seq)::DOUBLE {where}"
            f" AND seq >= {begin} AND seq < {begin + ROUNDS_A_QUESTION}"
            f" AND ts_ns >= {begin * interval_ns - MARGIN_NS}"
            f" AND ts_ns < {(begin + ROUNDS_A_QUESTION) * interval_ns + MARGIN_NS} GROUP BY rank"
        ):
            by_rank.setdefault(rank, []).append(numbers)
    return [
        (rank, sum(n for n, *_ in parts), parts[0][1], parts[-1][2], sum(total for *_, total in parts))
        for rank, parts in by_rank.items()
    ]


def has_each_round(n: int, first: int, last: int, total: float) -> bool:
    """Whether n rounds from the first to the last are all different, by their count and their sum."""
    return last - first + 1 == n and abs(total - n * (first + last) / 2) < 0.5 * n


def sustained_rows_per_s(hub: ServedHub) -> float:
    """The rate that the hub acknowledges when it is sent rows at full speed, one minute at most."""
    words = ["--ranks", "64", "--batch", "5000", "--cluster", "calibration", "--events"]
    first = json.loads(stress(hub, *words, "200000").communicate()[0])["acknowledged_per_s"]
    whole = stress(hub, *words, str(int(first * CALIBRATION_S)), "--job", "second").communicate()[0]
    rate: float = json.loads(whole)["acknowledged_per_s"]
    return rate


def overload(hub: ServedHub, folder: Path, rows_per_s: float, duration_s: float) -> Offered:
    """Offer rows at a rate."""
    rounds_per_s = rows_per_s / (N_AGENTS * RANKS_EACH)
    agents = [agent(hub, folder, number, int(1e9 / rounds_per_s)) for number in range(N_AGENTS)]
    origin = load.rounds_until(agents[0].job, time.time_ns())
    begin_s, n_rounds = time.monotonic(), 0
    sampled_s = printed_s = 0.0
    samples: list[int] = []
    while (now_s := time.monotonic()) < begin_s + duration_s:
        n_due = min(int((now_s - begin_s) * rounds_per_s) - n_rounds, MAX_ROWS_OFFERED // RANKS_EACH)
        if n_due > 0:
            for each in agents:
                each.offer(origin + n_rounds, n_due, origin)
            n_rounds += n_due
        if now_s - sampled_s >= SAMPLE_S:
            sampled_s = now_s
            samples.append(hub.memory_mb())
        if now_s - printed_s >= PROGRESS_S:
            printed_s = now_s
            print_progress(hub, now_s - begin_s, agents)
        time.sleep(TICK_S)
    return Offered(agents, origin, n_rounds, time.monotonic() - begin_s, samples)


def print_progress(hub: ServedHub, elapsed_s: float, agents: list[Agent]) -> None:
    """One line for the reader of a long run."""
    n_acknowledged = sum(agent.sender.n_acknowledged for agent in agents)
    n_not_sent = sum(agent.sender.n_not_sent for agent in agents)
    text = f"{elapsed_s:.0f} s: {n_acknowledged:,} rows acknowledged, {n_not_sent:,} not sent, {hub.memory_mb()} MB"
    print(text, file=sys.stderr, flush=True)


def agent(hub: ServedHub, folder: Path, number: int, interval_ns: int) -> Agent:
    """An agent with an empty spool."""
    target = Target(
        address=f"127.0.0.1:{hub.grpc}",
        node=f"node-{number}",
        cluster="overload",
        token=lambda: hub.token_file.read_text().strip(),
        insecure=True,
        about={"agent": "stallscope overload"},
    )
    spool = Spool(folder / f"spool-{number}", max_bytes=SPOOL_BYTES)
    job = Job(
        name="overload",
        ranks=RANKS_EACH,
        first_rank=number * RANKS_EACH,
        world=N_AGENTS * RANKS_EACH,
        interval_ns=interval_ns,
        straggler=None,
        late_ns=0,
    )
    return Agent(HubSender(spool, HubChannel(target)), spool, job)


def drained_s(hub: ServedHub, offered: Offered, max_drain_s: float) -> float:
    """Seconds until the hub has acknowledged all rows. Raises RuntimeError if the spools do not drain."""
    agents = offered.agents
    begin_s = printed_s = time.monotonic()
    while (now_s := time.monotonic()) - begin_s < max_drain_s:
        time.sleep(TICK_S)
        if sum(agent.sender.n_acknowledged + agent.sender.n_not_sent for agent in agents) >= offered.n_rows:
            return time.monotonic() - begin_s
        if now_s - printed_s >= PROGRESS_S:
            printed_s = now_s
            print_progress(hub, now_s - begin_s, agents)
    raise RuntimeError("the spools did not drain: " + "; ".join(agent.sender.status() for agent in agents))


if __name__ == "__main__":
    main()
