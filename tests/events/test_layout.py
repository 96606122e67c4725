"""The tables state the meaning of every field, and its unknown value."""

import numpy as np
import pytest

from stallscope.events import layout, names
from stallscope.events.layout import TABLES, UNKNOWN
from stallscope.events.names import CATEGORY_NAMES, DATATYPE_BYTES, N_CATEGORIES, Category, Datatype, Op
from stallscope.events.trace import Trace

BY_NAME = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
UNITS = ("_ns", "_bytes")


@BY_NAME
def test_fields_have_names_meanings_and_an_order_that_the_dtype_keeps(table):
    fields = [field.name for field in table.fields]
    assert len(set(fields)) == len(fields)
    assert all(field.meaning for field in table.fields)
    assert layout.dtype(table).names == tuple(fields)
    assert layout.dtype(table).itemsize == sum(np.dtype(field.format).itemsize for field in table.fields)


@BY_NAME
def test_times_are_signed_64_bits_and_carry_their_unit(table):
    for field in table.fields:
        if field.name.endswith("_ns") and field.name != "ledger_ns":
            assert field.format == "i8"
    assert {"ts_ns", "node", "pid"} <= {field.name for field in table.fields}


@BY_NAME
def test_optional_fields_can_hold_the_unknown_value(table):
    rows = layout.empty(table, 2)
    for field in table.fields:
        if field.may_be_unknown:
            assert rows[field.name].dtype.kind == "i"
            assert (rows[field.name] == UNKNOWN).all()
        else:
            assert not rows[field.name].any()


def test_a_trace_holds_every_table():
    for table in TABLES:
        assert getattr(Trace(), table.name).dtype == layout.dtype(table)


def test_categories_are_numbered_without_gaps_from_none():
    assert [int(category) for category in Category] == list(range(N_CATEGORIES + 1))
    assert len(CATEGORY_NAMES) == N_CATEGORIES
    assert CATEGORY_NAMES[Category.IO - 1] == "io"


def test_idle_states_stand_below_waits_and_waits_below_work():
    idle = (Category.LOCK, Category.OTHER_OFF, Category.SLEEP, Category.NET, Category.CHILD)
    work = (Category.IO, Category.COPY, Category.ALLOC, Category.ON_CPU, Category.FAULT, Category.DRIVER)
    assert max(idle) < Category.WAIT_GPU < Category.DEVICE < min(work)


def test_sizes_of_data_types():
    assert len(DATATYPE_BYTES) == len(Datatype)
    known = {
        Datatype.FLOAT16: 2,
        Datatype.BFLOAT16: 2,
        Datatype.FLOAT32: 4,
        Datatype.INT64: 8,
        Datatype.INT8: 1,
    }
    assert {kind: DATATYPE_BYTES[kind] for kind in known} == known


def test_synchronising_operations_are_those_that_need_everybody():
    assert set(names.SYNCHRONISING_OPS) == {Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL}
