"""The words of the command line, a file each, named in `cli.py`; what one needs is imported when it runs."""
