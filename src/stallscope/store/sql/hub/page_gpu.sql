-- Question: which values did the GPUs of a machine report last?
-- Parameters: node; from_ns, to_ns (NULL: any); max_rows.
-- Columns: gpu_uuid, name, unit, value.
SELECT gpu_uuid, name, any_value(unit) AS unit, arg_max(value_double, ts_ns) AS value
FROM node_metrics
WHERE node_id = $node AND gpu_uuid IS NOT NULL AND value_double IS NOT NULL
    AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
GROUP BY ALL ORDER BY gpu_uuid, name LIMIT $max_rows
