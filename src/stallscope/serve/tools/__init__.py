"""The hub's tools: each file with a constant TOOL is one question that people, programs and assistants ask alike."""
