-- Question: none; the tables of a node trace that are not event records (those follow from events/layout.py).
-- Times are ns: *_wall_ns since 1970 UTC, all others on the node's CLOCK_MONOTONIC.
CREATE TABLE schema_version (version INTEGER PRIMARY KEY, applied_wall_ns INTEGER NOT NULL);
CREATE TABLE nodes (node INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE symbols (symbol INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE clocks (node INTEGER NOT NULL, monotonic_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL,
                     error_ns INTEGER NOT NULL, is_synchronised INTEGER, max_error_us INTEGER, estimated_error_us INTEGER,
                     frequency_ppm REAL);
CREATE TABLE losses (node INTEGER NOT NULL, ts_ns INTEGER NOT NULL, kind TEXT NOT NULL, cpu INTEGER,
                     n_lost INTEGER NOT NULL);
CREATE TABLE sessions (id INTEGER PRIMARY KEY, node INTEGER NOT NULL, started_ns INTEGER, ended_ns INTEGER,
                       source TEXT NOT NULL, version TEXT NOT NULL, facts TEXT NOT NULL DEFAULT '{}');
CREATE TABLE stacks (stack INTEGER PRIMARY KEY, node INTEGER NOT NULL, pid INTEGER NOT NULL, frames TEXT NOT NULL);
CREATE TABLE verdicts (id INTEGER PRIMARY KEY, made_wall_ns INTEGER NOT NULL, verdict TEXT NOT NULL);
CREATE TABLE annotations (id INTEGER PRIMARY KEY, ts_ns INTEGER NOT NULL, node INTEGER NOT NULL, pid INTEGER NOT NULL,
                          label TEXT NOT NULL, value TEXT);
