-- Question: when was the last event of each node?
-- Columns: node, latest_ns (monotonic).
SELECT node, MAX(ts_ns) AS latest_ns
FROM (SELECT node, ts_ns FROM collectives UNION ALL SELECT node, ts_ns FROM snapshots
      UNION ALL SELECT node, ts_ns + COALESCE(duration_ns, 0) AS ts_ns FROM spans) AS everything
GROUP BY node ORDER BY node
