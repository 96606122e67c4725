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
