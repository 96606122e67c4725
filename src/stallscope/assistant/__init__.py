"""The tools of one machine for assistants: MCP on standard input and output, or at /mcp of the agent's API.

asking   what a tool works with
tools/   one tool a file, each with one constant TOOL
serving  the MCP server of them, and the prompt `investigate`
"""
