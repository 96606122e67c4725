"""Interfaces for people, programs and assistants: HTTP, MCP and SQL return the same answers."""
