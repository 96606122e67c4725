"""Tables that other interfaces show: rows by process, chains of slow calls."""
