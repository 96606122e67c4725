"""`stallscope version`."""

import typer

from stallscope import __version__


def version() -> None:
    """Print the version."""
    typer.echo(f"stallscope {__version__}")
