"""What a CUDA function does, by its name: for sources that tell names only."""

from stallscope.events.names import Op

_OPS = (  # the first that the call's name holds, in lower case
    ("mallochost", Op.ALLOC),
    ("malloc", Op.ALLOC),
    ("memalloc", Op.ALLOC),
    ("free", Op.FREE),
    ("memcpy", Op.COPY),
    ("graphlaunch", Op.GRAPH_LAUNCH),
    ("launch", Op.LAUNCH),
    ("waitevent", Op.STREAM_WAIT),
    ("sync", Op.SYNC),
)


def op_of(name: str) -> Op:
    """The class of a CUDA runtime or driver function, by its name; NONE where it is of no known class."""
    plain = name.lower()
    return next((op for word, op in _OPS if word in plain), Op.NONE)
