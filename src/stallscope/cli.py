"""The command line: which words there are, and what becomes of an error."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from stallscope.commands.demo import demo
from stallscope.commands.explain import explain
from stallscope.commands.import_ import import_
from stallscope.commands.trace import trace
from stallscope.commands.version import version
from stallscope.errors import StallscopeError

app = typer.Typer(
    help="Which rank drags a GPU job, since when, why, and what does it cost?",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of the help page. A group of commands (`hub ...`) is an app of its own: app.add_typer(...).
app.command()(explain)
app.command("import")(import_)
app.command()(demo)
app.command()(trace)
app.command()(version)


def main() -> None:
    """Run the command line; an error is one line on stderr and an exit code, never a traceback."""
    with _one_line_errors():
        app()


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except StallscopeError as error:
        print(f"stallscope: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (a pager, head): what is left would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
