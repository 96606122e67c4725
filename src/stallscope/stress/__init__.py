"""A load test for hubs: rows as agents send them, optionally with a straggler, and the time until acknowledgement."""
