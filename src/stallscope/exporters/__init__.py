"""Output to other tools: timeline files, tables, metrics and the rows that an agent sends to a hub."""
