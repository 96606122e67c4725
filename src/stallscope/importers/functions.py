"""The class of a CUDA function, by its name: for sources that contain only names."""

from stallscope.events.names import Op

_OPS = (  # the first entry that the lower-case name contains
    ("mallochost", Op.ALLOC),
    ("malloc", Op.ALLOC),
    ("memalloc", Op.ALLOC),
    ("free", Op.FREE),
    ("memcpy", Op.COPY),
    ("graphlaunch", Op.GRAPH_LAUNCH),
    ("launch", Op.LAUNCH),
    ("waitevent", Op.STREAM_WAIT),
    ("sync", Op.SYNC),
    ("gloo:", Op.SYNC),
)


def op_of(name: str) -> Op:
    """The class of a CUDA runtime or driver function, by its name; NONE for an unknown class."""
    plain = name.lower()
    return next((op for word, op in _OPS if word in plain), Op.NONE)
