"""The written attacks and honest queries, each with what must become of it."""

import json

import pyarrow as pa
import pytest

from stallscope.errors import BadInput, OverLimits, RefusedQuery, StallscopeError, TookTooLong
from stallscope.serve.sql.workers import QueryLimits, Sources, Workers
from stallscope.store.hub import schema


def one_event(tenant, tables):
    """Data of a tenant with a single event."""
    columns = {
        "tenant": tenant,
        "node_id": "node-1",
        "rank": 0,
        "nranks": 2,
        "op": "all_reduce",
        "attrs": "{}",
    }
    rows = pa.Table.from_pylist([columns], schema=schema.arrow_schema(schema.EVENTS))
    return Sources(None, {}, {"events": rows})


@pytest.fixture(scope="module")
def workers():
    result = Workers(one_event, n=2, limits=QueryLimits(timeout_s=3))
    yield result
    result.close()


def outcome(workers, sql):
    """The class of the error a query ends in, or "allow"."""
    try:
        workers.query(sql, tenant="a")
    except StallscopeError as error:
        assert "\n" not in str(error)
        return type(error)
    return "allow"


def text_of(query):
    return query["query"] or eval(query["query_generator"]["python"])


@pytest.mark.shared
def test_every_listed_query_has_its_expected_outcome(shared, workers):
    wrong = []
    for query in json.loads((shared / "sql_attacks.json").read_text())["queries"]:
        result = outcome(workers, text_of(query))
        allowed = {
            "static": {RefusedQuery, BadInput},
            "runtime": {RefusedQuery, BadInput, OverLimits, TookTooLong},
            "row-cap": {"allow"},
            None: {"allow"},
        }[query["must_stop_at"]]
        if result not in allowed:
            wrong.append((query["id"], text_of(query)[:80], result))
    assert not wrong
    assert outcome(workers, "SELECT count(*) FROM events") == "allow"


REFUSED = """
WITH x AS (INSERT INTO events(rank) VALUES (1) RETURNING *) SELECT * FROM x
SELECT * FROM (WITH x AS (DELETE FROM events RETURNING *) SELECT * FROM x)
WITH x AS (MERGE INTO events USING nodes ON false WHEN MATCHED THEN DELETE RETURNING *) SELECT * FROM x
SELECT * FROM events WHERE rank = (SELECT count(*) FROM checkpoint())
SELECT * FROM main.checkpoint()
SELECT * FROM system.main.duckdb_settings()
SELECT current_setting('memory_limit')
SELECT 'memory_limit'.current_setting()
SELECT getenv('HOME')
SELECT main.getenv('HOME')
SELECT getvariable('x')
SELECT * FROM read_blob('/etc/passwd')
SELECT * FROM read_ndjson_auto('/etc/passwd')
SELECT * FROM "read_csv"('/etc/passwd')
SELECT * FROM READ_CSV('/etc/passwd')
SELECT * FROM read_parquet('/srv/**/*.parquet')
SELECT * FROM glob('/**')
SELECT * FROM 'hub.duckdb'
SELECT * FROM "events.parquet"
SELECT * FROM "memory"."main"."events.parquet"
SELECT * FROM 's3://bucket/x.parquet'
SELECT * FROM 'https://example.com/x.parquet'
TABLE '/etc/passwd'
SUMMARIZE '/etc/passwd'
DESCRIBE '/etc/passwd'
DESCRIBE duckdb_settings()
FROM duckdb_functions()
FROM pg_catalog.pg_tables
FROM information_schema.columns
FROM sqlite_schema
FROM stored_events
FROM hot_events
FROM "hot_events"
FROM main."hot_events"
SHOW TABLES
SHOW DATABASES
SHOW events_and_more
FROM pragma_table_info('events')
PRAGMA table_info('events')
PRAGMA version
CALL pragma_version()
EXPLAIN ANALYZE SELECT 1
EXPLAIN (ANALYZE) SELECT 1
EXPLAIN (FORMAT JSON) SELECT 1
EXPLAIN INSERT INTO events(rank) VALUES (1)
EXPLAIN EXPLAIN SELECT 1
EXPLAIN SELECT * FROM read_text('/etc/passwd')
/* EXPLAIN */ EXPLAIN ANALYZE DELETE FROM events
EXPORT DATABASE '/tmp/x'
COPY events TO '/tmp/x.csv'
COPY FROM DATABASE memory TO x
CREATE TABLE x(a INT)
CREATE OR REPLACE TEMP MACRO abs(x) AS 1
SET threads = 8
RESET memory_limit
USE main
LOAD '/tmp/x.duckdb_extension'
EXECUTE p
SELECT 1; SELECT 2
SELECT 1;;SELECT 2
SELECT nextval('s')
SELECT * FROM query('SELECT 1')
SELECT * FROM query_table(['events'])
FROM histogram('events', 'rank')
SELECT json_serialize_sql('SELECT 1')
SELECT json_execute_serialized_sql('{}')
PIVOT events ON op USING count(*)
PIVOT (FROM read_csv('/etc/passwd')) ON op IN ('a') USING count(*)
SELECT list_transform([1], lambda x: getenv('HOME'))
SELECT [getenv('HOME') FOR x IN [1]]
SELECT {'a': getenv('HOME')}
SELECT MAP {'a': version()}
SELECT CASE WHEN true THEN version() END
SELECT count(*) FILTER (WHERE version() = '') FROM events
SELECT sum(rank) OVER (ORDER BY version()) FROM events
SELECT sum(rank) OVER w FROM events WINDOW w AS (PARTITION BY version())
SELECT rank FROM events GROUP BY rank HAVING version() = ''
SELECT rank FROM events QUALIFY version() = ''
SELECT rank FROM events ORDER BY version()
SELECT rank FROM events LIMIT (SELECT length(version()))
SELECT rank FROM events OFFSET length(version())
SELECT DISTINCT ON (version()) rank FROM events
SELECT * REPLACE (version() AS op) FROM events
SELECT COLUMNS(c -> c = version()) FROM events
SELECT e.rank FROM events e JOIN nodes n ON version() = ''
SELECT string_agg(op, version()) FROM events
SELECT string_agg(op ORDER BY version()) FROM events
SELECT * FROM events, unnest([version()])
SELECT * FROM range(length(version()))
SELECT rank IN (SELECT length(version())) FROM events
SELECT rank BETWEEN 0 AND length(version()) FROM events
VALUES (version())
SELECT 1 UNION ALL SELECT length(version())
SELECT * FROM events AT (VERSION => 1)
SELECT * FROM events TABLESAMPLE reservoir(version())
WITH RECURSIVE t AS (SELECT version() AS a UNION ALL SELECT a FROM t) FROM t
WITH t(a) AS (SELECT 1) SELECT * FROM t, secret_seq
SELECT * FROM (SELECT * FROM (SELECT * FROM (SELECT * FROM auth_tokens)))
SELECT EXISTS (FROM auth_tokens)
SELECT current_user
SELECT user
SELECT session_user
SELECT current_schema
SELECT current_catalog
SELECT "current_user"
SELECT DEFAULT
SELECT sleep_ms(100000)
SELECT setseed(0.5)
SELECT txid_current()
SELECT pg_get_viewdef(1)
SELECT inet_server_addr()
SELECT st_astext(NULL)
SELECT finalize(NULL)
SELECT __internal_compress_string_ubigint('a')
SELECT repeat('x', 2000000000)
SELECT 'x'.repeat(2000000000)
SELECT repeat('x', rank) FROM events
SELECT lpad('x', 2000000000, 'y')
SELECT levenshtein(op, op) FROM events
SELECT\u200b 1
SELECT 1 \u202e
SELECT '\x00'
GRANT ALL ON events TO x
KILL 1
""".strip().splitlines()


@pytest.mark.parametrize("sql", REFUSED)
def test_forbidden_statements_are_refused_before_execution(workers, sql):
    assert outcome(workers, sql.encode().decode("unicode_escape") if "\\" in sql else sql) in (
        RefusedQuery,
        BadInput,
    )


ALLOWED = """
SELECT * FROM main.events
SELECT * FROM "events"
SELECT * FROM EVENTS
WITH events AS (SELECT 1 AS a) SELECT a FROM events
WITH auth_tokens AS (SELECT 1 AS a) SELECT * FROM auth_tokens
WITH a AS (SELECT 1 AS x), b AS (SELECT * FROM a) SELECT * FROM b
WITH RECURSIVE t(a) USING KEY (a) AS (SELECT 1 UNION SELECT a + 1 FROM recurring.t WHERE a < 3) SELECT * FROM t
SELECT 'SELECT version()', 'DROP TABLE events; --', $$read_csv$$
SELECT node_id AS "user" FROM events ORDER BY "user"
SELECT op AS "select" FROM events
PIVOT events ON op IN ('all_reduce') USING count(*) GROUP BY node_id
SELECT * FROM events PIVOT (count(*) FOR op IN ('all_reduce'))
DESCRIBE events
SUMMARIZE events
DESCRIBE SELECT rank FROM events
EXPLAIN (SELECT 1)
/* a comment */ EXPLAIN -- another
VALUES (1, 'a')
TABLE nodes
FROM verdicts
FROM causal_chains
FROM node_metrics
FROM collectives
FROM gpu_rates
SELECT * FROM events USING SAMPLE 10%
SELECT * FROM events TABLESAMPLE 3 ROWS
SELECT rank, lag(duration_ns) OVER (PARTITION BY rank ORDER BY ts) FROM events
SELECT op LIKE 'a%' ESCAPE '!', op ILIKE 'A', op SIMILAR TO 'a.*', op NOT LIKE 'x' FROM events
SELECT attrs->>'$.a', attrs->'$.a', json_keys(attrs) FROM events
SELECT * FROM events, json_each(attrs)
SELECT strftime(now(), '%Y'), epoch_ms(ts), make_timestamp(ts_ns // 1000), age(ts) FROM events
SELECT ts AT TIME ZONE 'Europe/Berlin' FROM events
SELECT rank::VARCHAR, TRY_CAST(op AS INTEGER), CAST(rank AS DECIMAL(10, 2)) FROM events
SELECT printf('%d', 1), format('{}', 1), lpad('1', 5, '0'), repeat('#', 10)
SELECT op.upper(), [1, 2, 3].list_sum(), 'a' || 'b', [1, 2][1], [1, 2, 3][1:2] FROM events
SELECT list_transform([1, 2], lambda x: x + 1), list_filter([1], lambda x: x > 0)
SELECT list_reduce([1, 2], lambda a, b: a + b)
SELECT GROUPING(op), count(*) FROM events GROUP BY ROLLUP (op)
SELECT max_by(op, duration_ns), arg_min(op, ts), first(op), mode(op), entropy(op) FROM events
SELECT * FROM events e SEMI JOIN nodes n USING (node_id)
SELECT * FROM events POSITIONAL JOIN nodes
SELECT (SELECT max(rank) FROM events), ARRAY(SELECT rank FROM events), rank = ANY (SELECT 0) FROM events
SELECT 'Stra\u00dfe', '\U0001f600'
""".strip().splitlines()


@pytest.mark.parametrize("sql", ALLOWED)
def test_an_honest_query_is_answered(workers, sql):
    if sql.endswith("-- another"):
        sql += "\nSELECT 1"
    if "\\u" in sql.lower():
        sql = sql.encode().decode("unicode_escape")
    assert workers.query(sql, tenant="a").columns
