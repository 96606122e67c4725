"""A tenant's own SQL: a gate that reads the engine's syntax tree, and processes that can be killed to run it."""
