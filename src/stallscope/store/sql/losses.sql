-- Question: how many records were lost, by kind?
-- Columns: kind, n_lost (records).
SELECT kind, SUM(n_lost) AS n_lost FROM losses GROUP BY kind ORDER BY kind
