-- Question: where did the time of each rank of a job go?
-- Parameters: cluster, comms: its communicators; from_ns, to_ns (NULL: any).
-- Columns: rank, n_rounds: collectives that the rank entered; first_ns, last_ns of them; one column for each category of
--   the time ledger: ns between the first and the last.
SELECT CASE WHEN rank >= 0 THEN rank ELSE comm_rank END AS rank, count(*) AS n_rounds, min(ts_ns) AS first_ns, max(ts_ns) AS last_ns,
    max(lock_ns) - min(lock_ns) AS lock_ns,
    max(other_off_ns) - min(other_off_ns) AS other_off_ns,
    max(sleep_ns) - min(sleep_ns) AS sleep_ns,
    max(net_ns) - min(net_ns) AS net_ns,
    max(child_ns) - min(child_ns) AS child_ns,
    max(wait_gpu_ns) - min(wait_gpu_ns) AS wait_gpu_ns,
    max(device_ns) - min(device_ns) AS device_ns,
    max(stopped_ns) - min(stopped_ns) AS stopped_ns,
    max(preempted_ns) - min(preempted_ns) AS preempted_ns,
    max(fault_ns) - min(fault_ns) AS fault_ns,
    max(driver_ns) - min(driver_ns) AS driver_ns,
    max(io_ns) - min(io_ns) AS io_ns,
    max(launch_ns) - min(launch_ns) AS launch_ns,
    max(copy_ns) - min(copy_ns) AS copy_ns,
    max(alloc_ns) - min(alloc_ns) AS alloc_ns,
    max(on_cpu_ns) - min(on_cpu_ns) AS on_cpu_ns
FROM collectives
WHERE cluster_id = $cluster AND list_contains($comms, comm_hash) AND on_cpu_ns IS NOT NULL
    AND (flags IS NULL OR flags & 4 = 0) AND CASE WHEN rank >= 0 THEN rank ELSE comm_rank END >= 0
    AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
GROUP BY ALL HAVING count(*) > 1 ORDER BY rank
