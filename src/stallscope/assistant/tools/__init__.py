"""The tools, one a file, each with one constant TOOL; serve/tools/registry.py says what a tool is."""
