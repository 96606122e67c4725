"""Requests to the processes of inference engines."""
