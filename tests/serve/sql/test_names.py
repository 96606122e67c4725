"""The lists of names are complete for the engine that is installed."""

import duckdb
import pytest

from stallscope.serve.sql.allowed_names import FILE, allowed


@pytest.fixture(scope="module")
def engine():
    with duckdb.connect() as connection:
        rows = connection.execute("SELECT function_type, function_name FROM duckdb_functions()").fetchall()
    return {(kind, name.lower()) for kind, name in rows}


def names(engine, *kinds):
    return {name for kind, name in engine if kind in kinds}


def test_every_function_of_the_engine_is_on_a_list(engine):
    lists = allowed()
    known = lists.functions | set(lists.refused)
    new = {
        name
        for name in names(engine, "scalar", "aggregate", "macro", "window") - known
        if " " not in name and not name.startswith(lists.refused_prefixes)
    }
    assert not new, (
        f"new functions: put each into {FILE.name}, allowed only if it computes from its arguments alone"
    )


def test_every_table_function_of_the_engine_is_on_a_list(engine):
    lists = allowed()
    new = names(engine, "table", "table_macro") - lists.table_functions - lists.refused_table_functions
    assert not new, f"new table functions: put each into {FILE.name}; hardly any is harmless"


def test_no_name_is_on_two_lists():
    lists = allowed()
    assert not lists.functions & set(lists.refused)
    assert not lists.table_functions & lists.refused_table_functions
    assert not {name for name in lists.functions if name.startswith(lists.refused_prefixes)}
    assert lists.sized <= lists.functions


def test_the_lists_were_made_for_the_engine_that_runs():
    assert duckdb.__version__.startswith(allowed().engine + ".")
