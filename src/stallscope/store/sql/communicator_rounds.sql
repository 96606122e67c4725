-- Question: how many rounds did each communicator have, on how many processes, and when?
-- Columns: comm_hash (64 bits, signed), n_processes, n_rounds, first_ns, last_ns (monotonic).
SELECT comm_hash, COUNT(DISTINCT node * 4294967296 + pid) AS n_processes,
       MAX(seq) - MIN(seq) + 1 AS n_rounds, MIN(ts_ns) AS first_ns, MAX(ts_ns) AS last_ns
FROM collectives GROUP BY comm_hash ORDER BY first_ns
