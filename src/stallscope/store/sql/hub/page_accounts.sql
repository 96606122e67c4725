-- Question: how much time did the ledger of each process of a job count in a window?
-- Parameters: from_ns, to_ns (NULL: any).
-- Columns: node_id, pid; elapsed_ns: between the first and the last account; one column for each category of the
--   ledger: ns between the two; has_no_calls: the system calls of off-CPU time are unknown; has_offcpu: off-CPU
--   intervals are recorded.
-- Accounts are rows of collectives and snapshots, as in diagnose/report/budget.py.
WITH accounts AS (
    SELECT node_id, coalesce(pid, -1 - rank) AS pid, ts_ns, flags & 256 > 0 AS has_no_calls,
        lock_ns, other_off_ns, sleep_ns, net_ns, child_ns, wait_gpu_ns, device_ns, stopped_ns, preempted_ns,
        fault_ns, driver_ns, io_ns, launch_ns, copy_ns, alloc_ns, on_cpu_ns
    FROM collectives WHERE on_cpu_ns IS NOT NULL AND (flags IS NULL OR flags & 4 = 0)
    UNION ALL
    SELECT node_id, pid, ts_ns, false,
        lock_ns, other_off_ns, sleep_ns, net_ns, child_ns, wait_gpu_ns, device_ns, stopped_ns, preempted_ns,
        fault_ns, driver_ns, io_ns, launch_ns, copy_ns, alloc_ns, on_cpu_ns
    FROM snapshots WHERE
        lock_ns + other_off_ns + sleep_ns + net_ns + child_ns + wait_gpu_ns + device_ns + stopped_ns +
        preempted_ns + fault_ns + driver_ns + io_ns + launch_ns + copy_ns + alloc_ns + on_cpu_ns > 0
)
SELECT node_id, pid, max(ts_ns) - min(ts_ns) AS elapsed_ns,
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
    max(on_cpu_ns) - min(on_cpu_ns) AS on_cpu_ns,
    coalesce(bool_or(has_no_calls), false) AS has_no_calls, EXISTS (SELECT 1 FROM offcpu) AS has_offcpu
FROM accounts
WHERE ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns) AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
GROUP BY node_id, pid HAVING count(*) > 1 ORDER BY node_id, pid
