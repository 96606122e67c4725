"""An entry of the table of traced functions: see operations.py and cuda_table.py."""

from collections.abc import Mapping
from typing import NamedTuple

from stallscope.events.kernel import Action, HookGroup, Shape
from stallscope.events.names import Category, Direction, MemoryKind, Op


class Operation(NamedTuple):
    """Functions with the same arguments and the same category.

    names: exported names without flavour, separated by spaces. inside: the category to which the time in them is
    charged.
    arguments: numbers of arguments, 1 is the first. Of NCCL and of graphs, in the cookie: "count" is elements, "peer" a
    rank, "datatype", "reduce_op", "comm", "stream". Of CUDA, in struct function: "count" is bytes (times `scale`),
    which "rows" multiplies, "kind" a cudaMemcpyKind, "target" and "source" addresses, "handle" the object of the call,
    "out" the address of its result, "stream".
    direction, memory: if the name implies them.
    """

    names: str
    op: Op
    inside: Category = Category.NONE
    action: Action = Action.CALL
    arguments: Mapping[str, int] = {}
    shape: Shape = Shape.PLAIN
    group: HookGroup = HookGroup.ALWAYS
    direction: Direction = Direction.NONE
    memory: MemoryKind = MemoryKind.NONE
    scale: int = 1
