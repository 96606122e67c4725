-- Question: in which code was a process off the CPU, and how long in total?
-- Parameters: node, pid; from_ns, to_ns (NULL: any); max_rows: the longest of them.
-- Columns: category, n: intervals; duration_ns: together; frames: JSON, innermost frame first.
SELECT o.category, count(*) AS n, sum(o.duration_ns)::BIGINT AS duration_ns, k.frames
FROM offcpu o JOIN (
    SELECT stack, any_value(frames) AS frames FROM stacks WHERE node_id = $node AND pid = $pid GROUP BY stack
) k ON k.stack = o.stack
WHERE o.node_id = $node AND o.pid = $pid AND o.duration_ns > 0
    AND ($from_ns::BIGINT IS NULL OR o.ts_ns >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR o.ts_ns < $to_ns)
GROUP BY o.category, k.frames ORDER BY duration_ns DESC LIMIT $max_rows
