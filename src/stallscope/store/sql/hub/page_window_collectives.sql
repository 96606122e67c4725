-- Question: which rows of collectives does a job have in a short window?
-- Parameters: from_ns, to_ns; max_rows.
-- Columns: all columns of collectives.
SELECT * FROM collectives WHERE ts_ns >= $from_ns AND ts_ns < $to_ns ORDER BY ts_ns LIMIT $max_rows
