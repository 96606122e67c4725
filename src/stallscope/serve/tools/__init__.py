"""The hub's tools: each file with a constant TOOL answers one question, for people, programs and assistants."""
