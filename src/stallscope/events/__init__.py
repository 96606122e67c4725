"""The one event vocabulary: what capture emits, the store keeps and the diagnosis reads.

names    operations, data types, ledger categories: the enumerations
layout   the record types (numpy dtypes), field by field with unit and meaning
ledger   the account of where a process's time went, from raw events
trace    a whole trace as arrays
"""
