"""Sources that record spans of work instead of collectives."""
