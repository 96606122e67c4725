-- Question: when did each rank enter some rounds of a communicator, and what does its time ledger show?
-- Parameters: comm, first_seq, last_seq; from_ns, to_ns (NULL: any); ranks (NULL: all).
-- Columns: rank, seq, node_id, pid, nranks, op, ts_ns, wait_enter_ns, wait_leave_ns, and the time ledger's running sums.
SELECT CASE WHEN rank >= 0 THEN rank ELSE comm_rank END AS rank, seq, node_id, pid, nranks, op, ts_ns, wait_enter_ns,
    wait_leave_ns, lock_ns, other_off_ns, sleep_ns, net_ns, child_ns, wait_gpu_ns,
    device_ns, stopped_ns, preempted_ns, fault_ns, driver_ns, io_ns,
    launch_ns, copy_ns, alloc_ns, on_cpu_ns
FROM collectives
WHERE comm_hash = $comm AND seq BETWEEN $first_seq AND $last_seq
    AND op NOT IN ('send', 'recv') AND CASE WHEN rank >= 0 THEN rank ELSE comm_rank END >= 0
    AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
    AND ($ranks::INTEGER[] IS NULL OR list_contains($ranks, CASE WHEN rank >= 0 THEN rank ELSE comm_rank END))
ORDER BY rank, seq
