-- Question: is there a verdict on the chosen jobs?
-- Parameters: none.
-- Columns: verdict_id; at most one row.
SELECT verdict_id FROM verdicts LIMIT 1
