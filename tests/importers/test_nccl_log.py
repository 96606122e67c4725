"""Logs of NCCL: the rank whose calls end earlier is named, and a transport that differs is remarked.

The lines follow src/init.cc, src/enqueue.cc and src/transport/net.cc of NVIDIA/nccl (commit 5067397c).
"""

from pathlib import Path

import pytest

from stallscope.importers import importer_for
from stallscope.importers.nccl_log import IMPORTER

from ..diagnose.reports import report_of


def lines(
    rank: int, n_calls: int, *, has_init: bool = True, network: str = "IB", gdr: bool = True, n_ranks: int = 8
) -> list[str]:
    own = f"node{rank // 4}:{5000 + rank}:{5100 + rank} [{rank % 4}] NCCL INFO"
    comm = f"0x55{rank:02d}00"
    out = [f"{own} Using network {network}"]
    if has_init:
        for state in ("Init START", "Init COMPLETE"):
            out.append(
                f"{own} ncclCommInitRankConfig comm {comm} rank {rank} nranks {n_ranks} cudaDev {rank % 4} nvmlDev "
                f"{rank % 4} busId {rank}000 commId 0xabc123 - {state}"
            )
        via = f"NET/{network}/0" + ("/GDRDMA" if gdr else "")
        out.append(f"{own} Channel 00/0 : {rank}[{rank % 4}] -> {(rank + 1) % n_ranks}[0] [send] via {via}")
    for i in range(n_calls):
        out.append(
            f"{own} AllReduce: opCount {i:x} sendbuff 0x1 recvbuff 0x2 count 1024 datatype 7 op 0 root 0 comm {comm} "
            f"[nranks={n_ranks}] stream 0x9"
        )
    return out


def written(path: Path, by_rank: list[list[str]], *, one_file: bool) -> Path:
    if one_file:
        longest = max(map(len, by_rank))
        rows = [own[i] for i in range(longest) for own in by_rank if i < len(own)]
        path.write_text("\n".join(["starting", *rows]) + "\n")
        return path
    path.mkdir()
    for rank, own in enumerate(by_rank):
        (path / f"nccl.node{rank // 4}.{5000 + rank}").write_text("\n".join(own) + "\n")
    return path


@pytest.mark.parametrize("one_file", [True, False])
@pytest.mark.parametrize("has_init", [True, False])
@pytest.mark.parametrize("culprit", [0, 6])
def test_the_rank_with_fewer_calls_is_named(tmp_path: Path, culprit: int, has_init: bool, one_file: bool):
    by_rank = [lines(rank, 39 if rank == culprit else 40, has_init=has_init) for rank in range(8)]
    source = written(tmp_path / "log", by_rank, one_file=one_file)
    assert importer_for(source) is IMPORTER
    (verdict,) = report_of(IMPORTER.read(source)).verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [culprit])
    assert "AllReduce [1024] float32" in verdict.summary


def test_equal_calls_leave_the_answer_open(tmp_path: Path):
    trace = IMPORTER.read(written(tmp_path / "log", [lines(rank, 40) for rank in range(8)], one_file=True))
    assert not [verdict for verdict in report_of(trace).verdicts if verdict.ranks]
    assert trace.coverage.gaps


@pytest.mark.parametrize(
    ("odd", "words"), [({"network": "Socket"}, "network Socket"), ({"gdr": False}, "no GPUDirect")]
)
def test_a_transport_that_differs_is_remarked(tmp_path: Path, odd: dict[str, object], words: str):
    by_rank = [lines(rank, 40, **(odd if rank == 5 else {})) for rank in range(8)]  # type: ignore[arg-type]
    report = report_of(IMPORTER.read(written(tmp_path / "log", by_rank, one_file=True)))
    remarks = [str(remark["what"]) for remark in report.benign]
    assert any(words in remark and "rank 5" in remark for remark in remarks)
