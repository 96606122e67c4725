"""The live view of a running trace: a page on the terminal, or one record per line, in a sidecar process."""
