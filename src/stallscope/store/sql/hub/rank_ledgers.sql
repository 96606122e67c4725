-- Question: in which states did each process of a cluster spend its time?
-- Parameters: cluster, from_ns, to_ns (NULL: any).
-- Columns: node_id, pid, rank, n_rounds: collectives it entered; first_ns, last_ns of them; one column for each
--   category of the ledger: ns between the first and the last.
-- Of a file that lies in the window as a whole, sealed_ledgers has the sums (store/hub/file_sums.py); collectives has
-- the other files and the hot rows.
WITH parts AS (
    SELECT node_id, pid, rank, count(*) AS n_rounds, min(ts_ns) AS first_ns, max(ts_ns) AS last_ns,
        min(lock_ns) AS least_lock_ns, max(lock_ns) AS most_lock_ns,
        min(other_off_ns) AS least_other_off_ns, max(other_off_ns) AS most_other_off_ns,
        min(sleep_ns) AS least_sleep_ns, max(sleep_ns) AS most_sleep_ns,
        min(net_ns) AS least_net_ns, max(net_ns) AS most_net_ns,
        min(child_ns) AS least_child_ns, max(child_ns) AS most_child_ns,
        min(wait_gpu_ns) AS least_wait_gpu_ns, max(wait_gpu_ns) AS most_wait_gpu_ns,
        min(device_ns) AS least_device_ns, max(device_ns) AS most_device_ns,
        min(stopped_ns) AS least_stopped_ns, max(stopped_ns) AS most_stopped_ns,
        min(preempted_ns) AS least_preempted_ns, max(preempted_ns) AS most_preempted_ns,
        min(fault_ns) AS least_fault_ns, max(fault_ns) AS most_fault_ns,
        min(driver_ns) AS least_driver_ns, max(driver_ns) AS most_driver_ns,
        min(io_ns) AS least_io_ns, max(io_ns) AS most_io_ns,
        min(launch_ns) AS least_launch_ns, max(launch_ns) AS most_launch_ns,
        min(copy_ns) AS least_copy_ns, max(copy_ns) AS most_copy_ns,
        min(alloc_ns) AS least_alloc_ns, max(alloc_ns) AS most_alloc_ns,
        min(on_cpu_ns) AS least_on_cpu_ns, max(on_cpu_ns) AS most_on_cpu_ns
    FROM collectives
    WHERE rank IS NOT NULL AND on_cpu_ns IS NOT NULL AND (flags IS NULL OR flags & 4 = 0)
        AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
        AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
        AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
    GROUP BY ALL
    UNION ALL
    SELECT node_id, pid, rank, n_rounds, first_ns, last_ns,
        least_lock_ns, most_lock_ns, least_other_off_ns, most_other_off_ns, least_sleep_ns, most_sleep_ns,
        least_net_ns, most_net_ns, least_child_ns, most_child_ns, least_wait_gpu_ns, most_wait_gpu_ns,
        least_device_ns, most_device_ns, least_stopped_ns, most_stopped_ns, least_preempted_ns, most_preempted_ns,
        least_fault_ns, most_fault_ns, least_driver_ns, most_driver_ns, least_io_ns, most_io_ns, least_launch_ns,
        most_launch_ns, least_copy_ns, most_copy_ns, least_alloc_ns, most_alloc_ns, least_on_cpu_ns, most_on_cpu_ns
    FROM sealed_ledgers WHERE $cluster::VARCHAR IS NULL OR cluster_id = $cluster
)
SELECT node_id, pid, rank, sum(n_rounds)::BIGINT AS n_rounds, min(first_ns) AS first_ns, max(last_ns) AS last_ns,
    max(most_lock_ns) - min(least_lock_ns) AS lock_ns,
    max(most_other_off_ns) - min(least_other_off_ns) AS other_off_ns,
    max(most_sleep_ns) - min(least_sleep_ns) AS sleep_ns,
    max(most_net_ns) - min(least_net_ns) AS net_ns,
    max(most_child_ns) - min(least_child_ns) AS child_ns,
    max(most_wait_gpu_ns) - min(least_wait_gpu_ns) AS wait_gpu_ns,
    max(most_device_ns) - min(least_device_ns) AS device_ns,
    max(most_stopped_ns) - min(least_stopped_ns) AS stopped_ns,
    max(most_preempted_ns) - min(least_preempted_ns) AS preempted_ns,
    max(most_fault_ns) - min(least_fault_ns) AS fault_ns,
    max(most_driver_ns) - min(least_driver_ns) AS driver_ns,
    max(most_io_ns) - min(least_io_ns) AS io_ns,
    max(most_launch_ns) - min(least_launch_ns) AS launch_ns,
    max(most_copy_ns) - min(least_copy_ns) AS copy_ns,
    max(most_alloc_ns) - min(least_alloc_ns) AS alloc_ns,
    max(most_on_cpu_ns) - min(least_on_cpu_ns) AS on_cpu_ns
FROM parts GROUP BY ALL HAVING sum(n_rounds) > 1 ORDER BY rank, node_id, pid
