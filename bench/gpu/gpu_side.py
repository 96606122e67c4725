"""The GPU side on real GPUs: which GPU is late, by `trace` and `explain`, and the cost of NCCL's profiler plugin.

python bench/gpu/gpu_side.py --out FOLDER --ranks 4 --budget 400, as root, after `make plugin`. With fewer GPUs than
ranks the ranks share them under MPS, each as a host of its own to NCCL. A part that fails leaves the other parts. In
FOLDER: gpu_side.json, the traces of all scenarios, and the output of `look`; a table is printed last.
"""

import argparse
import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_ranks import PLAIN, Ranks

if TYPE_CHECKING:
    from stallscope.capture.gpu import PluginState

STALLSCOPE = (sys.executable, "-c", "from stallscope.cli import main; main()")
_ON_S = 8.0  # the agent switches the plugin on within seconds
_SCENARIO_S = 25.0  # maximum time of a scenario, except of long scenarios
_LOOK_ROUNDS = 1500
_EXPLAIN_S = 90.0


def scenarios(last: int) -> dict[str, dict[str, Any]]:
    """The phases, and the rank that is late on its GPU or its host. last: the last rank.

    The order matters: after a CUDA graph was replayed, NCCL 2.27 to 2.30 report the times of an earlier kernel.
    """
    late, waits = {"gpu": last, "truth": last}, {"ahead": False}
    graph = {"graph": True, "rounds": 300}
    return {
        "healthy, hosts run ahead": {"truth": None},
        "GPU late in every 12th round, hosts run ahead": late,
        "GPU late in every round, hosts run ahead": late | {"every": 1, "ms": 3.0},
        "GPU late in every 12th round": late | waits,
        "host late in every 12th round": {"host": last, "truth": last} | waits,
        "healthy": waits | {"truth": None},
        "GPU late in every 12th round, default windows": late | {"mode": "sample", "rounds": 6000},
        "second process on the GPU": {"contender": True, "truth": last, "rounds": 300},
        "healthy, CUDA graph": graph | {"truth": None},
        "GPU late in every 12th replay of a CUDA graph": graph | late,
        "GPU late in every 12th replay of a CUDA graph, hosts wait": graph | late | waits,
        "host late in every 12th replay of a CUDA graph": graph | waits | {"host": last, "truth": last},
        "GPU late in every 12th round, hosts wait, after a CUDA graph": late | waits,
        "GPU late in every 12th round, hosts run ahead, after a CUDA graph": late,
    }


@contextmanager
def tracing(db: Path, ranks: Ranks, mode: str) -> Iterator[None]:
    """An agent that traces into db; with the mode `on`, the plugin records from the begin."""
    from stallscope.capture.gpu import plugin_states

    log = db.with_suffix(".log").open("w")
    agent = subprocess.Popen(
        [*STALLSCOPE, "trace", "--db", str(db), "--gpu-times", mode], stdout=log, stderr=log
    )
    end_s = time.monotonic() + 15
    while "attached to" not in db.with_suffix(".log").read_text() and time.monotonic() < end_s:
        time.sleep(0.1)
    end_s = time.monotonic() + (_ON_S if mode == "on" else 1.0)
    while time.monotonic() < end_s and not all(plugin.is_recording for plugin in plugin_states(ranks.pids)):
        time.sleep(0.1)
    try:
        yield
    finally:
        agent.send_signal(2)
        try:
            agent.wait(25)
        except subprocess.TimeoutExpired:
            agent.kill()


def late_rounds(db: Path, *, min_ms: float) -> dict[str, int]:
    """How often each rank was the last on the GPU by at least this much after the median of the other ranks."""
    from stallscope.diagnose.gpu.gpu_rounds import gpu_trace
    from stallscope.store import node

    on_gpus = gpu_trace(node.read(db))
    rows = on_gpus.collectives
    rank_of = dict(on_gpus.processes[["pid", "rank"]].tolist())
    out: dict[str, int] = defaultdict(int)
    keys, which = np.unique(rows[["comm_hash", "seq"]], return_inverse=True)
    out["rounds"] = len(keys)
    for number in range(len(keys)):
        own = rows[which == number]
        order = np.argsort(own["ts_ns"])
        if len(own) > 1 and own["ts_ns"][order[-1]] - np.median(own["ts_ns"][order[:-1]]) >= min_ms * 1e6:
            out[f"rank {rank_of.get(int(own['pid'][order[-1]]))}"] += 1
    return dict(out)


def hardware_counters(db: Path) -> dict[str, Any]:
    """The number of readings of each GPU's hardware counters, and the median of each counter."""
    from stallscope.events.layout import GPU_COUNTERS, UNKNOWN
    from stallscope.store import node

    rows = node.read(db).gpu_counters
    names = [field.name for field in GPU_COUNTERS.fields if field.name not in ("ts_ns", "node", "gpu")]
    out: dict[str, Any] = {}
    for gpu in np.unique(rows["gpu"]).tolist():
        own = rows[rows["gpu"] == gpu]
        known = {name: own[name][own[name] != UNKNOWN] for name in names}
        medians = {name: float(np.median(values)) for name, values in known.items() if len(values)}
        out[f"GPU {gpu}"] = {"readings": len(own), **medians}
    return out


def no_rounds(db: Path, plugins: "Sequence[PluginState]", *, n_ranks: int) -> str:
    """Where the operations were lost between NCCL and the rounds. plugins: their state at the end of the phase."""
    from stallscope.diagnose.gpu.gpu_rounds import gpu_arrivals
    from stallscope.events.names import GpuKernelFlag
    from stallscope.store import node

    trace = node.read(db)
    kernels = trace.gpu_kernels
    has_times = kernels["flags"] & GpuKernelFlag.HAS_GPU_TIMES != 0
    facts = [
        f"plugin loaded by {len(plugins)} of {n_ranks} ranks",
        f"{sum(not plugin.has_thread for plugin in plugins)} without its thread",
        f"{sum(plugin.is_recording for plugin in plugins)} recorded at the end",
        f"events {[plugin.n_events for plugin in plugins]}",
        f"records {[plugin.n_records for plugin in plugins]}",
        f"dropped {[plugin.n_dropped for plugin in plugins]}",
        f"traced processes {trace.processes['pid'].tolist()} of {[plugin.pid for plugin in plugins]}",
        f"operations in the trace {len(kernels)} of {len(np.unique(kernels['pid']))} processes",
        f"with GPU times {int(has_times.sum())}",
        f"in whole rounds {len(gpu_arrivals(kernels))}",
        f"lost {trace.lost}",
    ]
    return "; ".join(facts)


def judged(name: str, phase: dict[str, Any], ranks: Ranks, db: Path) -> dict[str, Any]:
    """Run a scenario under `trace`, and explain it."""
    from stallscope.capture.gpu import plugin_states

    truth = phase["truth"]
    contender = None
    if phase.get("contender"):
        contender = subprocess.Popen(
            [sys.executable, "-c", _CONTENDER.format(device=(len(ranks.processes) - 1) % ranks.n_gpus)],
            stdin=subprocess.PIPE,
        )
        time.sleep(5)
        truth = truth if ranks.n_gpus >= len(ranks.processes) else None  # a GPU shared by all ranks
    try:
        with tracing(db, ranks, phase.get("mode", "on")):
            ranks.begin({key: value for key, value in phase.items() if key in PLAIN})
            seconds = ranks.end()
            plugins = plugin_states(ranks.pids)
    finally:
        if contender and contender.stdin:
            contender.stdin.close()  # a process that is killed may take the MPS server with it
            contender.wait()
    result = {
        "name": name,
        "truth": truth,
        "every": phase.get("every", PLAIN["every"]),
        "round_ms": round(1e3 * seconds / phase.get("rounds", PLAIN["rounds"]), 3),
        "agent": db.with_suffix(".log").read_text()[-1500:],
    }
    late = late_rounds(db, min_ms=0.5 * phase.get("ms", 20.0))
    if not late["rounds"]:
        result["why_no_rounds"] = no_rounds(db, plugins, n_ranks=len(ranks.pids))
    return (
        result
        | explained(db, truth, is_on_host="host" in phase)
        | {"late_rounds": late, "hardware_counters": hardware_counters(db)}
    )


def explained(db: Path, truth: int | None, *, is_on_host: bool) -> dict[str, Any]:
    """The answer of `explain` on a trace. It is right if it names the rank, and whether its host or its GPU is late."""
    command = [*STALLSCOPE, "explain", "--db", str(db), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_EXPLAIN_S)
    report = json.loads(done.stdout) if done.returncode in (0, 20, 21) else {"answer": done.stderr[-400:]}
    verdicts = report.get("verdicts", [])
    named = sorted({rank for verdict in verdicts for rank in verdict["ranks"]})
    causes = [part["cause"] for verdict in verdicts for part in verdict["causes"][:1]]
    is_side_right = truth is None or all(name.startswith("gpu_") != is_on_host for name in causes)
    return {
        "named": named,
        "is_right": named == ([] if truth is None else [truth]) and is_side_right,
        "answer": report["answer"],
        "summaries": [verdict["summary"] for verdict in verdicts],
        "causes": causes,
        "evidence": [verdict["causes"][0]["evidence"] for verdict in verdicts if verdict["causes"]],
        "gaps": report.get("gaps", []),
    }


def kept(db: Path, copy: Path) -> None:
    """Keep a trace in one compressed file."""
    whole = db.with_suffix(".whole")
    with suppress(sqlite3.Error, OSError):
        with closing(sqlite3.connect(db)) as source:
            source.execute("VACUUM INTO ?", (str(whole),))
        with whole.open("rb") as plain, gzip.open(copy, "wb", compresslevel=4) as packed:
            shutil.copyfileobj(plain, packed)
        whole.unlink()


_CONTENDER = """
import select, sys
import torch
torch.cuda.set_device({device})
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""


def looked(ranks: Ranks, seconds: float) -> Iterator[tuple[str, Any]]:
    """`stallscope look` at a running rank, twice, and the time per round before, during and after it."""
    for name in ("before", "during", "after", "during again"):
        ranks.begin({"rounds": _LOOK_ROUNDS, "ahead": False})
        if name.startswith("during"):
            pid = str(ranks.facts[0]["pid"])
            words = [*STALLSCOPE, "look", "--pid", pid, "--seconds", str(seconds)]
            words += ["--json"] if name == "during again" else []
            begin_s = time.monotonic()
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            out = {"code": done.returncode, "out": done.stdout[-6000:], "err": done.stderr[-1000:]}
            yield name, out | {"wall_s": round(time.monotonic() - begin_s, 2)}
        yield f"round_ms {name}", round(1e3 * ranks.end() / _LOOK_ROUNDS, 3)


class Result:
    """The results so far, written after each part."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.data: dict[str, Any] = {"commit": os.environ.get("BENCH_COMMIT", ""), "scenarios": []}
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self) -> None:
        """Write all results."""
        (self.folder / "gpu_side.json").write_text(json.dumps(self.data, indent=1))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One part: its failure is noted, and the rest goes on."""
        try:
            yield
        except Exception:  # noqa: BLE001 - one part's failure must not cost the others
            self.data.setdefault("failures", {})[name] = traceback.format_exc(limit=-4)
            print(f"FAILED {name}: {self.data['failures'][name]}", flush=True)
        self.keep()


def main() -> None:
    """Run the scenarios and the costs, within the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget", type=float, default=400)
    parser.add_argument("--cost-s", type=float, default=120)
    parser.add_argument(
        "--sizes", nargs="*", help="of the collectives whose cost is measured: all by default"
    )
    parser.add_argument("--jobs", type=int, default=5, help="with the plugin, and as many without it")
    parser.add_argument("--look", action="store_true", help="`stallscope look` at a rank")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of scenarios")
    chosen = parser.parse_args()
    end_s = time.monotonic() + chosen.budget
    import torch

    from stallscope.capture.gpu import plugin_library

    with_plugin = {"NCCL_PROFILER_PLUGIN": str(plugin_library())}
    result = Result(chosen.out)
    with ExitStack() as stack:
        work = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True))
        )
        if torch.cuda.device_count() < chosen.ranks:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
        with result.part("scenarios"), ExitStack() as job:
            ranks = Ranks(chosen.ranks, with_plugin | {"STALLSCOPE_NCCL_GRAPHS": "1"}, 29611)
            job.callback(ranks.close)
            result.data["ranks"] = ranks.await_loaded()
            run_scenarios(result, ranks, work, only=chosen.only, end_s=end_s - chosen.cost_s)
            if chosen.look:
                result.data["look"] = {}
                with result.part("look"):
                    result.data["look"].update(looked(ranks, 1.0))
        if chosen.cost_s:
            with result.part("cost"):
                seconds = min(chosen.cost_s, end_s - time.monotonic())
                measure_cost(
                    result, chosen.ranks, with_plugin, seconds, n_jobs=chosen.jobs, sizes=chosen.sizes
                )
    _print(result.data)


def run_scenarios(
    result: Result, ranks: Ranks, work: Path, *, only: Sequence[int] | None, end_s: float
) -> None:
    """All scenarios for which there is time."""
    ranks.begin({"rounds": 50})
    print("warm:", ranks.end(), flush=True)
    for number, (name, phase) in enumerate(scenarios(len(ranks.processes) - 1).items()):
        is_chosen = only is None or number in only
        if not is_chosen or time.monotonic() + _SCENARIO_S > end_s:
            result.data.setdefault("skipped", []).extend([name] if is_chosen else [])
            continue
        with result.part(name):
            db = work / f"{number:02}.db"
            try:
                result.data["scenarios"].append(judged(name, phase, ranks, db))
            finally:
                kept(db, result.folder / f"{number:02}.db.gz")
            shown = {k: v for k, v in result.data["scenarios"][-1].items() if k != "agent"}
            print(json.dumps(shown), flush=True)


def measure_cost(
    result: Result,
    n_ranks: int,
    with_plugin: dict[str, str],
    seconds: float,
    *,
    n_jobs: int,
    sizes: Sequence[str] | None,
) -> None:
    """The cost of the plugin, by n_jobs jobs with it and n_jobs without it."""
    from plugin_cost import SIZES, costs

    begin_s = time.monotonic()

    def keep(cost: dict[str, Any]) -> None:
        result.data["cost"] = cost
        result.keep()

    with ExitStack() as stack:
        jobs = []
        for number in range(2 * n_jobs):
            environment = {} if number % 2 else with_plugin
            jobs.append(Ranks(n_ranks, environment, 29612 + number, is_pinned=True))
            stack.callback(jobs[-1].close)
        stack.callback(
            lambda: [job.kill() for job in jobs]
        )  # called first: a process with a GPU takes seconds to end
        for job in jobs:  # the jobs load their libraries at the same time
            job.await_loaded()
        left_s = seconds - (time.monotonic() - begin_s) - 5.0
        costs(jobs[::2], jobs[1::2], left_s, keep, sizes=sizes or tuple(SIZES))


def _print(data: dict[str, Any]) -> None:
    for row in data["scenarios"]:
        state = "right" if row["is_right"] else "WRONG"
        print(f"{state}  {row['name']}: named {row['named']}, truth {row['truth']}, {row['late_rounds']}")
        if "why_no_rounds" in row:
            print(f"       {row['why_no_rounds']}")
    for size, cost in data.get("cost", {}).items():
        for mode, change in cost["changes"].items():
            print(f"{size:23} {mode:50} {change}")
        print(f"{size:23} jobs differ by {cost['jobs_differ_percent']}")
    if "look" in data:
        print("look:", json.dumps(data["look"])[:1500])
    for name in data.get("skipped", ()):
        print("skipped, no time:", name)
    for name, words in data.get("failures", {}).items():
        print(f"FAILED {name}: {words.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
