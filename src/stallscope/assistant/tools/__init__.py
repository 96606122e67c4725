"""The tools, one per file, each with one constant TOOL; serve/tools/registry.py defines a tool."""
