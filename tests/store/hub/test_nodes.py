"""The machines that the hub knows: all machines that its rows name."""

import pyarrow as pa
import pytest

from stallscope.store.hub import schema
from stallscope.store.hub.journal import Entry
from stallscope.store.hub.nodes import Nodes


@pytest.mark.parametrize(
    ("clusters", "machines", "wanted"),
    [
        (["c", "c"], ["n", "n"], {("c", "n")}),
        ([None, None], ["n", "n"], {("", "n")}),
        (["c", "c"], [None, None], set()),
        (["c", "d"], ["n", "n"], {("c", "n"), ("d", "n")}),
        ([None, "d"], ["n", None], {("", "n")}),
    ],
)
def test_the_machines_that_rows_are_from_are_known_whether_one_or_several(clusters, machines, wanted):
    rows = pa.table(
        {"cluster_id": pa.array(clusters, pa.string()), "node_id": pa.array(machines, pa.string())}
    )
    for part in (rows, pa.concat_tables([rows.slice(0, 1), rows.slice(1)])):
        nodes = Nodes(schema.arrow_schema(schema.NODES).empty_table())
        nodes.record([Entry(1, "t", "events", part)], [], 1)
        result = nodes.rows("t")
        assert (
            set(zip(result["cluster_id"].to_pylist(), result["node_id"].to_pylist(), strict=True)) == wanted
        )


def many(tenant: str, n: int, prefix: str = "n") -> Entry:
    names = [f"{prefix}{number}" for number in range(n)]
    rows = pa.table({"cluster_id": pa.array(["c"] * n), "node_id": pa.array(names)})
    return Entry(1, tenant, "events", rows)


def test_a_commit_writes_a_limited_number_of_machines_and_the_next_commits_write_the_rest():
    nodes = Nodes(schema.arrow_schema(schema.NODES).empty_table())
    written = nodes.record([many("t", 2_500)], [], 1)
    sizes = []
    while written is not None:
        sizes.append(len(written))
        written = nodes.record([], [], 2)
    assert sizes == [1_000, 1_000, 500] and len(nodes.rows("t")) == 2_500


def test_one_tenant_cannot_take_all_places_of_machines():
    nodes = Nodes(schema.arrow_schema(schema.NODES).empty_table())
    for prefix in "abcde":
        nodes.record([many("attacker", 20_000, prefix)], [], 1)
    nodes.record([many("honest", 3)], [], 1)
    assert len(nodes.rows("honest")) == 3 and len(nodes.rows("attacker")) == 75_000
