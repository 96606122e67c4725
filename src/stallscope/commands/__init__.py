"""The commands, one file each, listed in `cli.py`. A command imports its dependencies when it runs."""
