"""From recorded events to the answer: a rank that stops in the middle of a job."""

import pytest

from stallscope.importers import importer_for

from ..diagnose.reports import only, report_of
from .recordings import Recording

N_STEPS, STEP_US = 30, 10_000
STUCK_US = (N_STEPS + 1) * STEP_US


def job(*, culprit: int, n_ranks: int = 4, quiet_s: float = 20, **stop: int) -> Recording:
    """All ranks reduce and wait in every step; after the last one the culprit does not come any more.

    stop: state and nr of its last switch. The others wait in a call that has not returned at the end.
    """
    made = Recording()
    for rank in range(n_ranks):
        pid, handle = 11 + rank, 0xA0 + rank
        made.init(100, pid, handle=handle, unique=0xBEEF, rank=rank, nranks=n_ranks)
        for step in range(1, N_STEPS + 1):
            begin = STEP_US * step + rank
            made.all_reduce(begin, pid, handle, 1000)
            made.all_reduce(begin + 3000, pid, handle, 2000)
            made.call(begin + 3050, begin + 3400, pid, "cudaStreamSynchronize", 77)
        if rank == culprit:
            made.off(STUCK_US, None, pid, **stop)
            continue
        made.all_reduce(STUCK_US + rank, pid, handle, 1000)
        made.add(STUCK_US + 3000, pid, "enter", "cudaStreamSynchronize", 77)
    made.off(2500, 2600, 11, state=1, nr=202)
    made.add(STUCK_US + quiet_s * 1e6, 99, "sched_wakeup", "", 5, 5)
    return made


def explained(made: Recording, tmp_path):
    folder = made.write(tmp_path / "recording")
    return report_of(importer_for(folder).read(folder))


@pytest.mark.parametrize(
    ("state", "nr", "doing"), [(1, 230, "sleep"), (1, 202, "lock"), (4, 62, "stopped"), (2, 17, "io")]
)
def test_the_rank_that_does_not_come_is_named(tmp_path, state, nr, doing):
    verdict = only(explained(job(culprit=2, state=state, nr=nr), tmp_path))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("hang", [2], [0, 1, 3])
    assert verdict.first_round == 2 * N_STEPS
    assert verdict.evidence.doing[0].state == doing


def test_a_rank_whose_process_has_ended_is_named_without_the_hang_delay(tmp_path):
    verdict = only(explained(job(culprit=1, state=0x10, nr=231, quiet_s=2), tmp_path))
    assert (verdict.kind, verdict.ranks) == ("hang", [1])
    assert verdict.evidence.doing[0].is_alive is False


def test_a_recording_that_ends_in_the_middle_of_a_round_is_not_a_hang(tmp_path):
    assert explained(job(culprit=2, state=1, nr=230, quiet_s=0.5), tmp_path).healthy
