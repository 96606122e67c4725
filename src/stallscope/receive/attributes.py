"""Maps attributes to columns: the names that senders use for the same fact, best first.

The record has priority over the scope, and the scope over the resource. Sources: OpenTelemetry's semantic conventions
1.37 (host, k8s, process, thread, hw, gpu); the `nccl.*`, `gpu.*` and `ingero.*` names of public GPU agents; our names.
"""

from functools import cache

from stallscope.store.hub import schema

OURS = "stallscope."
"""Prefix of our agents' attributes, followed by the column's name."""

_ALIASES: dict[str, tuple[str, ...]] = {
    "cluster_id": ("ingero.cluster.id", "stallscope.cluster.id", "k8s.cluster.name", "k8s.cluster.uid"),
    "node_id": ("ingero.node.id", "stallscope.node.id", "k8s.node.name", "host.name", "host.id", "hostname"),
    "rank": ("nccl.rank", "ingero.node.rank", "ingero.rank", "gpu.rank", "training.rank", "global_rank"),
    "nranks": ("nccl.nranks", "nccl.n_ranks", "nccl.world_size", "ingero.world_size", "world_size"),
    "local_rank": ("nccl.local_rank", "ingero.local_rank", "training.local_rank"),
    "op": ("nccl.op_type", "nccl.op", "nccl.operation", "nccl.collective.type", "op_type", "gpu.operation"),
    "comm_hash": ("nccl.comm_id_hash", "nccl.comm_hash", "nccl.comm.hash", "nccl.comm_id", "comm_id_hash"),
    "seq": ("nccl.seq", "nccl.seq_num", "nccl.sequence", "nccl.op_id", "nccl.op_count", "op_id", "seq_num"),
    "step": ("training.step", "ingero.step", "ml.step"),
    "pid": ("process.pid", "ingero.engine.pid"),
    "tid": ("thread.id",),
    "gpu_uuid": ("gpu.uuid", "hw.id", "gpu.id", "GPU_UUID", "DCGM_FI_DEV_UUID"),
    "duration_ns": ("nccl.duration_ns", "gpu.duration_ns", "ingero.duration_ns"),
    "count_bytes": ("nccl.count_bytes", "nccl.bytes", "nccl.size.bytes", "gpu.memcpy.bytes", "bytes"),
    "datatype": ("nccl.datatype", "nccl.data_type"),
    "reduce_op": ("nccl.reduce_op", "nccl.red_op"),
    "peer_rank": ("nccl.peer_rank", "nccl.peer", "nccl.p2p.peer.rank", "nccl.root"),
    "value_double": ("value", "score", "ingero.value"),
    "causal_chain_id": ("causal_chain.id", "ingero.causal_chain_id", "ingero.causal_chain.id", "chain_id"),
    "gpu_model": ("ingero.gpu_model", "gpu.model", "gpu.name", "hw.model"),
    "provider": ("ingero.provider", "cloud.provider"),
    "n_gpus": ("ingero.gpu_count", "gpu.count"),
}
_NEVER_LIFTED = frozenset({"ts", "ts_ns", "received_at", "tenant", "attrs", "late_ns"})
"""Columns that attributes of any name never fill."""

ABOUT_NODE = ("gpu_model", "provider", "n_gpus")
"""Resource attributes that describe the node, for the table `nodes`."""


@cache
def keys_of(column: str) -> tuple[str, ...]:
    """Attribute names that fill a column, best first."""
    return (OURS + column, *_ALIASES.get(column, ()), column)


@cache
def lifted_columns(table: str) -> tuple[schema.Column, ...]:
    """The columns of a table that attributes fill."""
    return tuple(column for column in schema.TABLES[table].columns if column.name not in _NEVER_LIFTED)
