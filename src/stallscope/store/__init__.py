"""Where events are kept. node: the trace of one machine, a SQLite file."""
