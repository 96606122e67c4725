"""The hub's verdicts on simulated jobs equal the verdicts of explain and the truth: ranks, causes, victims, costs."""

import bench_hub_truth as bench
import pytest


@pytest.mark.parametrize("name", bench.FAST)
def test_hub_and_explain_and_truth_agree(name: str) -> None:
    row = bench.run(name)
    assert {mark: is_met for mark, is_met in bench.marks(row).items() if not is_met} == {}, row
    explained, running, ended = row["n_victims"]
    assert explained == running == ended == [row["n_ranks"] - 1] * len(explained)
