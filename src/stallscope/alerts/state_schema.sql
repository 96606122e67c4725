-- The incidents whose alerts were sent, by tenant and verdict: open or closed, and the last sent state.
CREATE TABLE IF NOT EXISTS incidents (
    tenant TEXT NOT NULL, verdict_id TEXT NOT NULL,
    is_open INTEGER NOT NULL, updated_ns INTEGER NOT NULL, incident TEXT NOT NULL,
    PRIMARY KEY (tenant, verdict_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members (
    key TEXT NOT NULL, receiver TEXT NOT NULL, tenant TEXT NOT NULL, verdict_id TEXT NOT NULL,
    PRIMARY KEY (key, receiver, tenant, verdict_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS alerts (
    key TEXT NOT NULL, receiver TEXT NOT NULL, tenant TEXT NOT NULL,
    raised_ns INTEGER NOT NULL, over_ns INTEGER, acknowledged_by TEXT, acknowledged_ns INTEGER,
    notice TEXT NOT NULL, digest TEXT NOT NULL,
    delivered TEXT NOT NULL DEFAULT '', delivered_digest TEXT NOT NULL DEFAULT '', delivered_ns INTEGER,
    revision INTEGER NOT NULL DEFAULT 0, n_failures INTEGER NOT NULL DEFAULT 0,
    next_attempt_ns INTEGER NOT NULL DEFAULT 0, last_error TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (key, receiver)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS silences (
    silence_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, match TEXT NOT NULL, until_ns INTEGER NOT NULL,
    made_by TEXT NOT NULL, comment TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS progress (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
