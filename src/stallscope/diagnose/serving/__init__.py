"""Requests to inference engines: latencies, late requests, and the reason for their delay."""
