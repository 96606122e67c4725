"""The proof on real GPUs, unattended, within a time: jobs with faults, traced and explained, and the slowdown.

    bench/gpu/run_there.sh --budget 560

Parts run in the order of their importance. Parts that do not fit in the time are skipped and listed, and a failed
part does not affect other parts. In OUT: results.json (all reports), slowdown.json, hook_cost.json, table.txt, and
traces with the ranks' clocks and the output of all programs, failures in a separate folder. Needs root, and src and
bench on PYTHONPATH.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import job as training
import judging
import keeping
import slowdown
from judging import Judged
from running import STALLSCOPE, Failed, Job, end, explained, sharing_gpus, start_job, tracing
from scenarios import EMULATED, FIRST, MORE, ONE_GPU, Scenario
from slowdown import WORKLOADS, Workload

BENCH = Path(__file__).parent.parent
HOOK_COST_S = 60
AROUND_S = 9  # a scenario's start of NCCL and end
END_S = 25
MIN_SLOWDOWN_S = 30
RESERVE_S = 15  # for packing the results

TWICE_S = 6.5  # of each of the two traces of a job
HANG_S = 14.0  # a hang is reported after 10 s
LATE = ", attached late"

HOPELESS = 4  # failures in a row from the start

Part = Scenario | Workload
Answer = tuple[str, "Future[tuple[dict[str, Any], Judged]]"]


@dataclass
class Proof:
    """The results so far, and the folders. work: in memory; disk: for traces, as a user has them."""

    chosen: argparse.Namespace
    work: Path
    disk: Path
    n_ranks: int
    end_s: float
    judged: dict[str, Judged] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    slowdowns: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    took_s: dict[str, float] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic() - RESERVE_S

    @property
    def is_hopeless(self) -> bool:
        """Nothing has worked so far: no use in spending more time."""
        return len(self.failures) >= HOPELESS and not self.judged and not self.slowdowns

    @property
    def script(self) -> str:
        """The job's program."""
        return "emulated.py" if self.chosen.emulated else "job.py"

    def agent_words(self, job: Job) -> tuple[str, ...]:
        """The agent traces all processes, as for a user; with emulated jobs of others, only our processes."""
        return ("--pid", str(job.launcher.process.pid)) if self.chosen.emulated else ()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One part: its failure is noted, and the rest goes on."""
        begin_s = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one part's failure must not cost the others
            self.failures[name] = str(error) if isinstance(error, Failed) else traceback.format_exc(limit=-3)
            tell(f"FAILED {name}: {self.failures[name].strip()[-400:]}")
        self.took_s[name] = round(time.monotonic() - begin_s, 1)


class Jobs:
    """The jobs of the parts, in order; each job loads its libraries while the previous job runs."""

    def __init__(self, proof: Proof, parts: Sequence[Part], sharing: Mapping[str, str]):
        """sharing: the environment of those that share GPUs."""
        self._proof, self._parts, self._sharing, self._begun = proof, parts, sharing, dict[int, Job]()

    def take(self, i: int) -> Job:
        """The job of part i, at its gate or on the way there; the next one begins to load."""
        job = self.begin(i)
        if i + 1 < len(self._parts) and self._proof.left_s > AROUND_S:
            self.begin(i + 1)
        return job

    def end(self, i: int) -> None:
        """Nothing of part i's job stays."""
        if i in self._begun:
            end(self._begun.pop(i).launcher)

    def end_all(self) -> None:
        """Nothing of any job stays."""
        for i in list(self._begun):
            self.end(i)

    def begin(self, i: int) -> Job:
        """Part i's job begins to load, if it has not."""
        if i not in self._begun:
            part, proof = self._parts[i], self._proof
            seconds = "0" if isinstance(part, Workload) or proof.chosen.twice else str(part.seconds)
            self._begun[i] = start_job(
                proof.script,
                proof.work / slug(part.name),
                n_ranks=proof.n_ranks * jobs_a_gpu(part),
                words=(*part.words, "--seconds", seconds, *(["--one-gpu"] if proof.chosen.one_gpu else [])),
                environment=self._sharing if jobs_a_gpu(part) > 1 or proof.chosen.one_gpu else {},
            )
        return self._begun[i]


def slug(name: str) -> str:
    """A name for files."""
    return name.replace(",", "").replace(" ", "-")


def tell(words: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%T')} {words}", flush=True)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of scenarios and workloads")
    parser.add_argument("--skip", nargs="*", default=[], help="likewise")
    parser.add_argument("--from", dest="first", default="", help="begin with this part, in the normal order")
    parser.add_argument("--one-gpu", action="store_true", help="four ranks on one GPU")
    parser.add_argument(
        "--restarts", type=int, default=0, help="also start and stop the agent this often for each slowdown"
    )
    parser.add_argument(
        "--twice", action="store_true", help="trace each job from its start, then again while it runs"
    )
    parser.add_argument("--emulated", action="store_true", help="the demo's job instead of PyTorch")
    return parser.parse_args()


def main() -> None:
    """Prove, store and print."""
    chosen = options()
    begin_s = time.monotonic()
    chosen.out.mkdir(parents=True, exist_ok=True)
    n_ranks = chosen.ranks or (4 if chosen.emulated or chosen.one_gpu else training.n_gpus())
    scratch: dict[str, Any] = {"prefix": "stallscope-proof-", "ignore_cleanup_errors": True}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", **scratch) as work,
        tempfile.TemporaryDirectory(dir="/var/tmp", **scratch) as disk,
    ):
        proof = Proof(chosen, Path(work), Path(disk), n_ranks, begin_s + chosen.budget)
        try:
            prove(proof)
        finally:
            keep(proof)
            keeping.pack(proof.work, proof.disk, right=right(proof), out=chosen.out)
            words = keeping.table(proof.judged.values(), proof.slowdowns, proof.failures, proof.skipped)
            (chosen.out / "table.txt").write_text(words + "\n")
            print(words, flush=True)
    sys.exit(bool(proof.failures))


def prove(proof: Proof) -> None:
    """All parts, the most important first."""
    chosen, parts = proof.chosen, wanted(proof.chosen)
    answers: list[Answer] = []
    with ExitStack() as held:
        is_sharing = any(jobs_a_gpu(part) > 1 for part in parts) or (chosen.one_gpu and not chosen.emulated)
        jobs = Jobs(proof, parts, held.enter_context(sharing_gpus(proof.work)) if is_sharing else {})
        held.callback(jobs.end_all)
        if parts:
            jobs.begin(0)
        agent_starts(proof)
        if measures_hooks(proof.chosen):
            with proof.part("hook cost"):
                measure_hooks(proof)
        with ThreadPoolExecutor(1) as explaining:
            for i, part in enumerate(parts):
                if proof.left_s < needed_s(part, is_twice=proof.chosen.twice) or proof.is_hopeless:
                    proof.skipped.append(part.name)
                    jobs.end(i)
                    continue
                tell(f"{part.name} ({proof.left_s:.0f} s left)")
                with proof.part(part.name):
                    job = jobs.take(i)
                    if isinstance(part, Workload):
                        proof.slowdowns.append(slowed(proof, part, job, following=parts[i:]))
                    elif chosen.twice:
                        traced_twice(proof, part, job, answers=answers, explaining=explaining)
                    else:
                        traced(proof, part, job, answers=answers, explaining=explaining)
                jobs.end(i)
                collect(proof, answers, wait=False)
            collect(proof, answers, wait=True)


def measures_hooks(chosen: argparse.Namespace) -> bool:
    """Whether the cost of the probes is a part: only with the whole plan."""
    is_part = chosen.emulated or chosen.only or chosen.first or chosen.one_gpu
    return not is_part and not any(word in "hook cost" for word in chosen.skip)


def agent_starts(proof: Proof) -> None:
    """Raises Failed, before any time is spent, where the agent cannot trace at all."""
    command = [*STALLSCOPE, "trace", "--duration", "1s", "--db", str(proof.disk / "first.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Failed(f"the agent does not start: {done.stderr.strip()[-600:]}")
    (proof.disk / "first.db").unlink()
    tell(f"the agent starts: {done.stderr.strip().splitlines()[-1]}")


def wanted(chosen: argparse.Namespace) -> list[Part]:
    """By --only, --skip and --from, and what this kind of job can do."""
    plan: list[Part] = [*FIRST, *WORKLOADS[:2], *MORE[:9], *WORKLOADS[2:3], *MORE[9:], *WORKLOADS[3:]]
    if chosen.one_gpu:
        plan = list(ONE_GPU)
    if chosen.first:
        plan = plan[next(i for i, part in enumerate(plan) if part.name == chosen.first) :]
    if chosen.emulated:
        plan = [part for part in plan if part.name in EMULATED]
    return [
        part
        for part in plan
        if not any(word in part.name for word in chosen.skip)
        and (not chosen.only or any(word in part.name for word in chosen.only))
    ]


def jobs_a_gpu(part: Part) -> int:
    """How many jobs share a GPU."""
    return part.jobs_a_gpu if isinstance(part, Workload) else 1


def needed_s(part: Part, *, is_twice: bool = False) -> float:
    """The time that the part needs to start."""
    if isinstance(part, Workload):
        return MIN_SLOWDOWN_S
    seconds = 2 * (HANG_S if part.hangs else TWICE_S) if is_twice else part.seconds
    return seconds + AROUND_S


def slowed(proof: Proof, part: Workload, job: Job, *, following: Sequence[Part]) -> dict[str, Any]:
    """The slowdown of a workload. It may take its share of the time when nothing else follows. Raises Failed."""
    is_last = all(isinstance(entry, Workload) for entry in following)
    seconds = max(part.seconds, proof.left_s / len(following)) if is_last else part.seconds
    return slowdown.measured(
        part,
        job,
        disk=proof.disk,
        seconds=min(seconds, proof.left_s),
        agent_words=proof.agent_words(job),
        n_restarts=proof.chosen.restarts,
    )


def traced(
    proof: Proof, part: Scenario, job: Job, *, answers: list[Answer], explaining: ThreadPoolExecutor
) -> None:
    """Traces a scenario; the trace is explained while later parts run. Raises Failed."""
    db = proof.disk / f"{slug(part.name)}.db"
    try:
        trace(part, job, db, agent_words=proof.agent_words(job))
    finally:
        if db.exists() and (job.folder / "ready0").exists():
            answers.append((part.name, explaining.submit(answer, part, job.folder, db)))


def traced_twice(
    proof: Proof, part: Scenario, job: Job, *, answers: list[Answer], explaining: ThreadPoolExecutor
) -> None:
    """Traces a scenario from its start, and again while the job runs. Raises Failed."""
    names = {part.name: proof.disk / f"{slug(part.name)}.db"}
    names[part.name + LATE] = proof.disk / f"{slug(part.name)}.late.db"
    job.await_loaded()
    try:
        for i, db in enumerate(names.values()):
            with tracing(db, words=proof.agent_words(job)):
                if not i:
                    job.go()
                    job.await_ready()
                time.sleep(HANG_S if part.hangs else TWICE_S)
        job.stop()
        if not part.hangs:
            job.await_end(END_S)
    finally:  # the job has written the whole truth
        for name, db in names.items():
            if db.exists() and (job.folder / "ready0").exists():
                answers.append((name, explaining.submit(answer, part._replace(name=name), job.folder, db)))


def trace(scenario: Scenario, job: Job, db: Path, *, agent_words: tuple[str, ...]) -> None:
    """Runs the job while the agent traces it. Raises Failed."""
    job.await_loaded()
    if scenario.attaches:
        job.go()
        job.await_ready()
        time.sleep(1)
        with tracing(db, words=agent_words):
            job.await_end(scenario.seconds + END_S)
        return
    with tracing(db, words=agent_words):
        job.go()
        job.await_ready()
        if scenario.hangs:
            time.sleep(scenario.seconds)
        else:
            job.await_end(scenario.seconds + END_S)


def answer(scenario: Scenario, folder: Path, db: Path) -> tuple[dict[str, Any], Judged]:
    """The report on a trace, and how right it is."""
    report = explained(db)
    return report, judging.judged(scenario.name, folder, report)


def collect(proof: Proof, answers: list[Answer], *, wait: bool) -> None:
    """Takes the answers that are there, and keeps all there is."""
    for name, future in list(answers):
        if wait or future.done():
            answers.remove((name, future))
            with proof.part(f"explain {name}"):
                proof.reports[name], result = future.result()
                proof.judged[name] = result
                tell(f"{name}: {'right' if not result.wrong else result.wrong} ({result.said})")
    keep(proof)


def measure_hooks(proof: Proof) -> None:
    """Runs the benchmark of the hooks' cost; it needs gcc."""
    script = str(BENCH / "bench_hook_cost.py")
    try:
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=min(HOOK_COST_S, proof.left_s)
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {HOOK_COST_S} s") from None
    if done.returncode:
        raise Failed(f"ended with code {done.returncode}: {done.stderr.strip()[-600:]}")
    shutil.copy(BENCH / "results/hook_cost.json", proof.chosen.out)


def right(proof: Proof) -> set[str]:
    """The names of files of scenarios that came out right."""
    names = {name: slug(name.removesuffix(LATE)) for name in proof.judged}
    wrong = {file for name, file in names.items() if proof.judged[name].wrong or name in proof.failures}
    return set(names.values()) - wrong


def keep(proof: Proof) -> None:
    """Writes the results so far to results.json and slowdown.json."""
    machine = keeping.machine(is_emulated=proof.chosen.emulated)
    results = {
        "machine": machine,
        "judged": [result.as_json() for result in proof.judged.values()],
        "failures": proof.failures,
        "skipped": proof.skipped,
        "took_s": proof.took_s,
        "reports": proof.reports,
    }
    keeping.write(proof.chosen.out / "results.json", results)
    if proof.slowdowns:
        keeping.write(
            proof.chosen.out / "slowdown.json", [{**entry, "machine": machine} for entry in proof.slowdowns]
        )


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(f"prove: {error}")
    except KeyboardInterrupt:
        sys.exit("prove: ended by a signal")
