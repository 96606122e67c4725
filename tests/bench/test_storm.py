"""In a storm of launches every call is counted, even if rings overflow."""

from pathlib import Path

import bench_storm
import pytest

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

N_CALLS = 20_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with empty launch functions."""
    return bench_storm.built(tmp_path_factory.mktemp("storm"))


def test_all_launches_are_counted(library: Path):
    counted = bench_storm.counted(library, N_CALLS)
    assert counted["n_received"] == bench_storm.N_PROCESSES * N_CALLS
    assert counted["n_unaccounted"] == 0


@pytest.mark.parametrize(
    ("bounds", "lost"),
    [({"ring_bytes": 1 << 16}, "ring_full"), ({"max_waiting_bytes": 1 << 14}, "waited_too_long")],
)
def test_every_call_is_either_received_or_counted_as_lost(library: Path, bounds: dict[str, int], lost: str):
    changes = bench_storm.told(library, N_CALLS, **bounds)
    assert changes["n_unaccounted"] == 0
    assert changes["n_lost"][lost] > 0
