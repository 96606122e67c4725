"""The tools, one per file, each with one constant TOOL; serve/tools/tool_registry.py defines a tool."""
