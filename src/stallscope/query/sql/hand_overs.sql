-- When did a process of an inference engine wake a thread of another process of the engine, and how long did the thread
-- wait before and after? By a message over a socket or a pipe, by a signal through shared memory, or by a released lock.
-- Only waits that offcpu has: 1 ms or longer.
--
-- ts_ns: the wakeup. from_pid, from_tid: the process and thread that woke it. waited_ns: before the wakeup.
-- pickup_ns: from the wakeup until the thread ran.
-- The last row of a process has its group, because its parent may be recognised later.
WITH engines AS (SELECT node, pid, group_pid, MAX(ts_ns) FROM servers GROUP BY node, pid)
SELECT
    o.node,
    o.ts_ns + o.duration_ns - COALESCE(o.runnable_ns, 0) AS ts_ns,
    o.waker_pid AS from_pid,
    o.waker_tid AS from_tid,
    o.pid,
    o.tid,
    o.duration_ns - COALESCE(o.runnable_ns, 0) AS waited_ns,
    COALESCE(o.runnable_ns, 0) AS pickup_ns
FROM offcpu AS o
JOIN engines AS woken ON woken.node = o.node AND woken.pid = o.pid
JOIN engines AS waker ON waker.node = o.node AND waker.pid = o.waker_pid AND waker.group_pid = woken.group_pid
WHERE o.waker_pid != o.pid AND o.duration_ns IS NOT NULL
