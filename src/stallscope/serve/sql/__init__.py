"""A tenant's own SQL: a gate that checks the engine's syntax tree, and disposable processes that run the query."""
