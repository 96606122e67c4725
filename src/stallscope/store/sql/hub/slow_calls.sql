-- Question: which calls of some processes took longest?
-- Parameters: cluster (NULL: any), rank, or node and pid of a process (NULL: the rank's); from_ns, to_ns (NULL: any), max_rows.
-- Columns: ts_ns, node_id, pid, tid, op, symbol, duration_ns, count_bytes, frames (JSON, NULL where no stack is known).
WITH mine AS (
    SELECT DISTINCT node_id, pid FROM collectives
    WHERE $pid::BIGINT IS NULL AND rank = $rank AND pid IS NOT NULL
        AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
    UNION SELECT $node::VARCHAR, $pid::BIGINT WHERE $pid::BIGINT IS NOT NULL
), slow AS (
    SELECT c.* FROM calls c JOIN mine m ON c.node_id = m.node_id AND c.pid = m.pid
    WHERE duration_ns IS NOT NULL AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
        AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
    ORDER BY duration_ns DESC, ts_ns LIMIT $max_rows
)
SELECT s.ts_ns, s.node_id, s.pid, s.tid, s.op, s.symbol, s.duration_ns, s.count_bytes, any_value(k.frames) AS frames
FROM slow s LEFT JOIN stacks k ON k.node_id = s.node_id AND k.pid = s.pid AND k.stack = s.stack
GROUP BY ALL ORDER BY s.duration_ns DESC, s.ts_ns
