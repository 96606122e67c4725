"""The GPU side on real GPUs: which GPU is late, by `trace` and `explain`, and the cost of NCCL's profiler plugin.

python bench/gpu/gpu_side.py --out FOLDER --ranks 4 --budget 400, as root, after `make plugin`. With fewer GPUs than
ranks the ranks share them under MPS, each as a host of its own to NCCL. Results: gpu_side.json, and a table last.
"""

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from stallscope.capture.gpu import PluginState

HERE = Path(__file__).parent
STALLSCOPE = (sys.executable, "-c", "from stallscope.cli import main; main()")
PLAIN = {"rounds": 600, "matmuls": 60, "gpu": -1, "host": -1, "every": 12, "ms": 20.0, "bytes": 1 << 20}
PLAIN |= {"ahead": True, "graph": False}
_SIZES = {"1 KB": 1024, "4 MB": 4 << 20, "256 MB": 256 << 20}
_WINDOW_S = 0.6
_PULSE_S = 0.1 * _WINDOW_S  # the largest share of the time that the agent's default windows take
_COMPARED = (("none", "loaded, off"), ("none", "sampled"), ("none", "on"), ("loaded, off", "sampled"))
_COMPARED += (("loaded, off", "on"),)
_ON_S = 8.0  # the agent switches the plugin on within seconds


def scenarios(last: int) -> dict[str, dict[str, Any]]:
    """The phases, and whether a rank is late on its GPU or its host. last: the last rank."""
    late = {"gpu": last, "truth": last}
    return {
        "healthy, hosts run ahead": {"truth": None},
        "GPU late in every 12th round, hosts run ahead": late,
        "GPU late in every round, hosts run ahead": late | {"every": 1, "ms": 3.0},
        "GPU late in every 12th replay of a CUDA graph": late | {"graph": True, "rounds": 300, "every": 12},
        "healthy, CUDA graph": {"graph": True, "rounds": 300, "truth": None},
        "second process on the GPU": {"contender": True, "truth": last, "rounds": 150},
        "GPU late in every 12th round": late | {"ahead": False},
        "host late in every 12th round": {"host": last, "ahead": False, "truth": last},
        "GPU late in every 12th round, default windows": late | {"mode": "sample", "rounds": 2400},
        "healthy": {"ahead": False, "truth": None},
    }


class Ranks:
    """The running ranks of a job."""

    def __init__(self, n_ranks: int, environment: dict[str, str], port: int):
        import torch

        self.n_gpus = torch.cuda.device_count()
        self.processes = []
        for rank in range(n_ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(n_ranks), "LOCAL_RANK": str(rank)}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if self.n_gpus < n_ranks:
                own |= {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "4"}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "gpu_side_rank.py")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | own | environment,
                )
            )
        self.facts = [self._answer(process) for process in self.processes]

    def _answer(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"a rank ended with code {process.wait()}")

    def begin(self, phase: dict[str, Any]) -> None:
        """Start a phase on all ranks."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(PLAIN | phase) + "\n")
            process.stdin.flush()

    def end(self) -> float:
        """Wait for its end. Returns the seconds of a round."""
        times = [self._answer(process) for process in self.processes]
        return (max(t["end_ns"] for t in times) - min(t["begin_ns"] for t in times)) / 1e9

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def tracing(db: Path, ranks: Ranks, mode: str) -> Iterator[None]:
    """An agent that traces into db; with the mode `on`, the plugin records from the begin."""
    from stallscope.capture.gpu import plugin_states

    pids = [fact["pid"] for fact in ranks.facts]
    log = db.with_suffix(".log").open("w")
    agent = subprocess.Popen(
        [*STALLSCOPE, "trace", "--db", str(db), "--gpu-times", mode], stdout=log, stderr=log
    )
    end_s = time.monotonic() + 15
    while "attached to" not in db.with_suffix(".log").read_text() and time.monotonic() < end_s:
        time.sleep(0.1)
    end_s = time.monotonic() + (_ON_S if mode == "on" else 1.0)
    while time.monotonic() < end_s and not all(plugin.is_recording for plugin in plugin_states(pids)):
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


def judged(name: str, phase: dict[str, Any], ranks: Ranks, work: Path) -> dict[str, Any]:
    """Run a scenario under `trace`, and explain it."""
    from stallscope.capture.gpu import plugin_states

    db, truth = work / f"{len(list(work.glob('*.db')))}.db", phase["truth"]
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
            plugins = plugin_states([fact["pid"] for fact in ranks.facts])
    finally:
        if contender and contender.stdin:
            contender.stdin.close()  # a process that is killed may take the MPS server with it
            contender.wait()
    done = subprocess.run([*STALLSCOPE, "explain", "--db", str(db), "--json"], capture_output=True, text=True)
    report = json.loads(done.stdout) if done.returncode in (0, 20, 21) else {"answer": done.stderr[-400:]}
    verdicts = report.get("verdicts", [])
    named = sorted({rank for verdict in verdicts for rank in verdict["ranks"]})
    late = late_rounds(db, min_ms=0.5 * phase.get("ms", 20.0))
    reason = {} if late["rounds"] else {"why_no_rounds": no_rounds(db, plugins, n_ranks=len(ranks.facts))}
    return reason | {
        "name": name,
        "truth": truth,
        "named": named,
        "is_right": named == ([] if truth is None else [truth]),
        "answer": report["answer"],
        "summaries": [verdict["summary"] for verdict in verdicts],
        "causes": [part["cause"] for verdict in verdicts for part in verdict["causes"][:1]],
        "evidence": [verdict["causes"][0]["evidence"] for verdict in verdicts if verdict["causes"]],
        "gaps": report.get("gaps", []),
        "late_rounds": late,
        "every": phase.get("every", PLAIN["every"]),
        "round_ms": round(1e3 * seconds / phase.get("rounds", PLAIN["rounds"]), 3),
        "agent": db.with_suffix(".log").read_text()[-1500:],
    }


def kept(work: Path, copy: Path) -> None:
    """Keep the newest trace in one file."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(max(work.glob("*.db"), key=_number))) as db:
        db.execute("VACUUM INTO ?", (str(copy),))


def _number(db: Path) -> int:
    return int(db.stem)


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


def costs(groups: dict[str, Ranks], sizes: Sequence[str], seconds: float) -> dict[str, Any]:
    """The change of the time per round in alternating windows of the modes.

    none: without the plugin. sampled: on for _PULSE_S of each window, the share of the time that the agent records by
    default, at shorter intervals: with more switches, so the cost is an upper bound.
    """
    from stallscope.capture.gpu.nccl_ring import KERNELS, Event, ring_of

    rings = [ring_of(fact["pid"]) for fact in groups["plugin"].facts]
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    modes = ("none", "loaded, off", "sampled", "on")
    n_rounds: dict[str, int] = {}

    def switch(seconds: float) -> None:
        for ring in rings:
            ring.switch(KERNELS if seconds else Event(0), seconds=seconds)

    def window(size: str, mode: str, rounds: int) -> float:
        switch(30 if mode == "on" else 0)
        time.sleep(0.05)
        ranks = groups["without" if mode == "none" else "plugin"]
        ranks.begin({"rounds": rounds, "matmuls": 2, "bytes": _SIZES[size]})
        if mode == "sampled":
            time.sleep(0.2 * _WINDOW_S)
            switch(_PULSE_S)
        taken_s = ranks.end()
        for ring in rings:
            ring.drain()
        return taken_s / rounds

    for size in sizes:
        taken_s = [window(size, mode, 20) for mode in (*modes, "none", "loaded, off")]
        n_rounds[size] = max(int(_WINDOW_S / min(taken_s)), 4)
    end_s, turn = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        turn += 1
        for size in sizes:
            for mode in modes if turn % 2 else tuple(reversed(modes)):
                times[size, mode].append(window(size, mode, n_rounds[size]))
    return {
        size: {
            f"{mode}, against {base}": _change(times[size, base], times[size, mode])
            for base, mode in _COMPARED
            if times[size, base]
        }
        for size in sizes
    }


def _change(base: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    """The mean change in percent, with half the width of its 95 % interval, over pairs of windows."""
    change = 100 * (np.array(own) / np.array(base) - 1)
    n = len(change)
    student = 1.96 + 2.7 / max(n - 1, 1)  # Student's t at 97.5 %, within 0.02 for 10 windows and more
    half = student * float(change.std(ddof=1)) / n**0.5 if n > 1 else float("nan")
    middle = np.sort(change)[n // 10 : n - n // 10]
    return {
        "round_us": round(1e6 * float(np.median(own)), 2),
        "percent": round(float(change.mean()), 3),
        "half_95": round(half, 3),
        "trimmed_percent": round(float(middle.mean()), 3),
        "n": n,
    }


def looked(ranks: Ranks, seconds: float) -> dict[str, Any]:
    """`stallscope look` at a running rank, and the time per round before, during and after it."""
    out: dict[str, Any] = {}
    for name in ("before", "during", "after"):
        ranks.begin({"rounds": 600, "ahead": False})
        if name == "during":
            pid = str(ranks.facts[0]["pid"])
            words = [*STALLSCOPE, "look", "--pid", pid, "--seconds", str(seconds)]
            begin_s = time.monotonic()
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            out |= {"code": done.returncode, "out": done.stdout[-3000:], "err": done.stderr[-1000:]}
            out["wall_s"] = round(time.monotonic() - begin_s, 2)
        out[f"round_ms_{name}"] = round(1e3 * ranks.end() / 600, 3)
    return out


def main() -> None:
    """Run the scenarios and the costs, within the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget", type=float, default=400)
    parser.add_argument("--cost-s", type=float, default=120)
    parser.add_argument("--sizes", nargs="*", default=["1 KB", "4 MB"])
    parser.add_argument("--look", action="store_true", help="`stallscope look` at a rank")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of scenarios")
    chosen = parser.parse_args()
    end_s = time.monotonic() + chosen.budget
    import torch

    from stallscope.capture.gpu import plugin_library

    with_plugin = {"NCCL_PROFILER_PLUGIN": str(plugin_library())}
    result: dict[str, Any] = {"commit": os.environ.get("BENCH_COMMIT", ""), "scenarios": []}
    chosen.out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        (chosen.out / "gpu_side.json").write_text(json.dumps(result, indent=1))

    with ExitStack() as stack:
        work = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True))
        )
        if torch.cuda.device_count() < chosen.ranks:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
        ranks = Ranks(chosen.ranks, with_plugin | {"STALLSCOPE_NCCL_GRAPHS": "1"}, 29611)
        stack.callback(ranks.close)
        result["ranks"] = ranks.facts
        ranks.begin({"rounds": 50})
        print("warm:", ranks.end(), flush=True)
        for number, (name, phase) in enumerate(scenarios(chosen.ranks - 1).items()):
            if (chosen.only and number not in chosen.only) or time.monotonic() > end_s - chosen.cost_s - 30:
                continue
            result["scenarios"].append(judged(name, phase, ranks, work))
            if not result["scenarios"][-1]["is_right"]:
                kept(work, chosen.out / f"wrong-{number}.db")
            print(json.dumps({k: v for k, v in result["scenarios"][-1].items() if k != "agent"}), flush=True)
            keep()
        if chosen.look:
            result["look"] = looked(ranks, 2.0)
            keep()
        ranks.close()
        if chosen.cost_s:
            groups = {
                "plugin": Ranks(chosen.ranks, with_plugin, 29612),
                "without": Ranks(chosen.ranks, {}, 29613),
            }
            for group in groups.values():
                stack.callback(group.close)
            left_s = min(chosen.cost_s, end_s - time.monotonic() - 5)
            result["cost"] = costs(groups, chosen.sizes, left_s)
            keep()
    _print(result)


def _print(result: dict[str, Any]) -> None:
    for row in result["scenarios"]:
        state = "right" if row["is_right"] else "WRONG"
        print(f"{state}  {row['name']}: named {row['named']}, truth {row['truth']}, {row['late_rounds']}")
        if "why_no_rounds" in row:
            print(f"       {row['why_no_rounds']}")
    for size, modes in result.get("cost", {}).items():
        for mode, cost in modes.items():
            print(f"{size:7} {mode:28} {cost}")
    if "look" in result:
        print("look:", json.dumps(result["look"])[:1500])


if __name__ == "__main__":
    main()
