"""The answers of PyTorch's fr_trace and of HTA on generated files, next to the answers of stallscope.

By hand: compare_analysers.py PYTHON FOLDER, with an interpreter that has HolisticTraceAnalysis 0.5, and the folder that
holds torch/distributed/flight_recorder of PyTorch 2.11. An analyser is right if it names exactly the culprits.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

from report import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.importers.generators import SHAPES, dumps, profiles
from tests.importers.generators.job import Job
from tests.importers.generators.shapes import Format

from stallscope.commands.report import diagnosed
from stallscope.errors import BadTrace, NotFound
from stallscope.importers.reading import read_files
from stallscope.settings import Settings

N_SEEDS = 3
_HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
print("STRAGGLERS", TraceAnalysis(trace_dir=sys.argv[1]).get_potential_stragglers(num_candidates=int(sys.argv[2])))
"""


def main() -> None:
    """Compare on all shapes but the largest."""
    python, recorder = sys.argv[1:3]
    forms = (
        (
            replace(dumps.FORMATS[0], write=_dumps),
            "fr_trace",
            lambda folder, n: fr_trace(python, recorder, folder),
        ),
        (replace(profiles.FORMATS[0], write=_profiles), "HTA", lambda folder, n: hta(python, folder, n)),
    )
    rows = []
    for form, name, ask in forms:
        for shape in (shape for shape in SHAPES if shape not in ("many_ranks", "other_encoding")):
            marks = [compared(form, shape, seed, ask) for seed in range(N_SEEDS)]
            for process, answers in ((name, [m[0] for m in marks]), ("stallscope", [m[1] for m in marks])):
                rows.append({"files": form.name, "shape": shape, "analyser": process, "answers": answers})
            print(rows[-2], rows[-1], sep="\n", flush=True)
    report("compare_analysers", {"n_seeds": N_SEEDS, "rows": rows})


def compared(form: Format, shape: str, seed: int, ask) -> tuple[str, str]:  # type: ignore[no-untyped-def]
    """The marks of the other analyser and of stallscope on one case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truth = SHAPES[shape](form, folder, Random(f"compare/{shape}/{seed}"))
        own = stallscope(folder)
        return mark(ask(folder, max(len(truth.culprits), 1)), truth.culprits), mark(own, truth.culprits)


def mark(named: set[int] | None, culprits: frozenset[int]) -> str:
    """right: exactly the culprits; open: no rank; wrong: other ranks, or others as well; error: no answer."""
    if named is None:
        return "error"
    return "right" if named == culprits else "open" if not named else "wrong"


def stallscope(folder: Path) -> set[int] | None:
    try:
        reports = [diagnosed(trace, Settings()) for trace in read_files([folder]).traces]
    except (BadTrace, NotFound):
        return None
    verdicts = [v for each in reports for v in each.verdicts if v.kind != "inconclusive"]
    last = max((v.evidence.job.number for v in verdicts if v.evidence.job), default=0)
    return {r for v in verdicts if not v.evidence.job or v.evidence.job.number == last for r in v.ranks}


def fr_trace(python: str, recorder: str, folder: Path) -> set[int] | None:
    """The ranks that fr_trace calls missing or culprits in the newest folder of the case."""
    folder = sorted({path.parent for path in folder.rglob("nccl_trace_rank_*")})[-1]
    words = [
        python,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        str(folder),
        "-p",
        "nccl_trace_rank_",
    ]
    result = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": recorder})
    if result.returncode:
        return None
    text = result.stdout + result.stderr
    lists = re.findall(r"missing ranks: \{([\d, ]+)\}", text)
    return {int(n) for ranks in lists for n in ranks.split(",")} | {
        int(n) for n in re.findall(r"Culprit rank (\d+)", text)
    }


def hta(python: str, folder: Path, n_candidates: int) -> set[int] | None:
    """The ranks that HTA calls potential stragglers: it always names as many as it is asked for."""
    folder = sorted({path.parent for path in folder.rglob("*.json")})[-1]
    result = subprocess.run(
        [python, "-c", _HTA, str(folder), str(n_candidates)], capture_output=True, text=True
    )
    match = re.search(r"STRAGGLERS \[([\d, ]*)\]", result.stdout)
    return {int(word) for word in re.findall(r"\d+", match[1])} if match else None


def _dumps(folder: Path, job: Job, chance: Random) -> None:
    dumps.FORMATS[0].write(folder, job, chance)
    for file in list(folder.iterdir()):
        number = re.search(r"(\d+)(?:_fr\.pkl)?$", file.name)
        assert number
        file.rename(folder / f"nccl_trace_rank_{number[1]}")


def _profiles(folder: Path, job: Job, chance: Random) -> None:
    for rank, trace in enumerate(profiles.rank_traces(job, chance.randrange(1000), has_steps=True)):
        name = f"{job.host(rank)}_{job.pid(rank)}.{1790 + job.number}.pt.trace.json"
        text = json.dumps(trace).replace(
            "ncclDevKernel_", "ncclKernel_"
        )  # HTA 0.5 knows names before NCCL 2.19 only
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
