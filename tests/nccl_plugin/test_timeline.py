"""The kernels of NCCL in the timeline of a trace, under their rank."""

import numpy as np
import pytest

from stallscope.diagnose import diagnose
from stallscope.events.names import GpuKernelFlag, Op
from stallscope.exporters.timeline_builder import build_track_set

from .test_gpu_arrival import trace
from .test_nccl_trace import N_RANKS, N_ROUNDS, Fault
from .test_replay_times import recorded
from .test_replay_times import trace as replay_trace


def test_each_rank_has_the_kernels_of_nccl_on_the_clock_of_its_host():
    whole = trace(Fault(2, 12))
    tracks = build_track_set(whole, diagnose(whole)).tracks
    kernels = [track for track in tracks if track.name.startswith("GPU: kernels of NCCL")]
    assert sum(len(track.slices) for track in kernels) == N_RANKS * N_ROUNDS
    parents = {tracks[track.parent - 1].name.split(":")[0] for track in kernels}
    assert parents == {f"rank {rank}" for rank in range(N_RANKS)}
    of_round = [entry for track in kernels for entry in track.slices if entry.arguments["round"] == 12]
    ends = [entry.ts_ns + entry.duration_ns for entry in of_round]
    assert len(of_round) == N_RANKS and np.ptp(ends) < 10_000
    late = max(of_round, key=lambda entry: entry.ts_ns)
    assert late.ts_ns - sorted(entry.ts_ns for entry in of_round)[1] == pytest.approx(20e6, abs=1e6)
    assert {entry.name for entry in of_round} == {"all_reduce"}


def test_replays_with_the_times_of_other_kernels_are_where_the_stream_reaches_them():
    """On one track: the operations of a stream do not overlap, and their rounds are in order."""
    whole = replay_trace(recorded("ahead"))
    tracks = build_track_set(whole, diagnose(whole)).tracks
    kernels = [track for track in tracks if track.name.startswith("GPU: kernels of NCCL")]
    assert [track.name for track in kernels] == ["GPU: kernels of NCCL"] * 2
    for track in kernels:
        rounds = [entry.arguments["round"] for entry in sorted(track.slices, key=lambda entry: entry.ts_ns)]
        assert rounds == sorted(rounds) and len(rounds) == len(whole.gpu_kernels) / 2


def test_transfers_of_proxies_name_their_peer():
    whole = trace(Fault())
    rows = whole.gpu_kernels
    rows["flags"][:3] = GpuKernelFlag.IS_NETWORK
    rows["op"][:3], rows["peer_rank"][:3], rows["network_ns"][:3] = Op.SEND, 2, 700
    tracks = build_track_set(whole, diagnose(whole)).tracks
    transfers = [
        entry for track in tracks if track.name.startswith("network of NCCL") for entry in track.slices
    ]
    assert len(transfers) == 3
    assert all(entry.arguments["peer"] == 2 and entry.arguments["network_ns"] == 700 for entry in transfers)
