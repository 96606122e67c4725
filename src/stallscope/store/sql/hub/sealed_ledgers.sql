-- Question: in each sealed file, between which values did the time ledger of each process run?
-- Parameters: none.
-- Columns: path, cluster_id, node_id, pid, rank; n_rounds: collectives it entered; first_ns, last_ns of them; for each
--   category of the ledger the least and the most ns.
-- sealed_files: the files' rows with their path (store/hub/file_sums.py).
SELECT path, cluster_id, node_id, pid, rank, count(*) AS n_rounds, min(ts_ns) AS first_ns, max(ts_ns) AS last_ns,
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
FROM sealed_files WHERE rank IS NOT NULL AND on_cpu_ns IS NOT NULL AND (flags IS NULL OR flags & 4 = 0)
GROUP BY ALL
