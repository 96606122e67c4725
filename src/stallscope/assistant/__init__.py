"""The tools of one machine for assistants: MCP on standard input and output, or at /mcp of the agent's API.

node_context  the context of the tools and their shared arguments
tools/        one tool per file, each with one constant TOOL
mcp_server    the MCP server with these tools, and the prompt `investigate`
"""
