"""The shared event vocabulary of capture, store and diagnosis.

The main modules:

names    operations, data types, ledger categories: the enumerations
layout   the record types (numpy dtypes), field by field with unit and meaning
ledger   the time ledger of a process, computed from raw events
trace    a whole trace as arrays
"""
