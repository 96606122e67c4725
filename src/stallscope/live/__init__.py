"""What a running trace shows: a page on the terminal, or a record a line. A process of its own beside the agent."""
