"""The command line: the list of commands, and the handling of errors."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from stallscope import __version__
from stallscope.commands.alerts import alerts_app
from stallscope.commands.annotate_command import annotate
from stallscope.commands.ask import ask
from stallscope.commands.check import check
from stallscope.commands.compare import compare
from stallscope.commands.dashboard import dashboard
from stallscope.commands.demo import demo
from stallscope.commands.explain import explain
from stallscope.commands.export import export
from stallscope.commands.gate import gate
from stallscope.commands.hub_command import hub_app
from stallscope.commands.idle import idle
from stallscope.commands.import_ import import_
from stallscope.commands.look import look
from stallscope.commands.mcp import mcp
from stallscope.commands.merge import merge
from stallscope.commands.plugin import plugin_app
from stallscope.commands.query import query
from stallscope.commands.rates_command import rates
from stallscope.commands.refused_values import check_commands
from stallscope.commands.report_cost import report_app
from stallscope.commands.report_job import job
from stallscope.commands.serve import serve
from stallscope.commands.settings_command import settings
from stallscope.commands.stacks import stacks
from stallscope.commands.stress import stress
from stallscope.commands.trace_command import trace
from stallscope.commands.usage_error import UsageError, is_help, usage_line
from stallscope.commands.version import version
from stallscope.credentials import masked
from stallscope.errors import BadInput, StallscopeError, StorageFailed, remedy_for_extra
from stallscope.terminal_text import echo_text

app = typer.Typer(
    help="Which rank slows down a GPU job, since when, why, and at what cost?",
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Which rank slows down a GPU job, since when, why, and at what cost?"""
    if version:
        typer.echo(f"stallscope {__version__}")
        raise typer.Exit


# In the order of the help page. A group of commands (`hub ...`) is an app of its own: app.add_typer(...).
app.command()(check)
app.command()(explain)
app.command()(compare)
app.command()(gate)
app.command()(dashboard)
app.command()(stacks)
app.command()(idle)
app.command()(look)
app.command()(query)
app.command()(export)
app.command()(merge)
app.command()(annotate)
app.command("import")(import_)
app.command()(demo)
app.command()(trace)
app.command()(serve)
app.command()(mcp)
app.add_typer(hub_app, name="hub")
app.add_typer(alerts_app, name="alerts")
report_app.command()(job)
app.add_typer(report_app, name="report")
app.add_typer(plugin_app, name="plugin")
app.command()(ask)
app.command()(stress)
app.command()(rates)
app.command()(settings)
app.command()(version)
check_commands(app)


@app.command("help", hidden=True)
def help_page(context: typer.Context, command: Annotated[list[str] | None, typer.Argument()] = None) -> int:
    """Print the help page of stallscope, or of a command."""
    code = app([*(command or []), "--help"], prog_name="stallscope", standalone_mode=False)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Run the command line; an error is one line on stderr and an exit code, never a traceback."""
    # gRPC reports failures to its callers, and would print them on stderr as well.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _open_closed_streams()
    with _one_line_errors(_write_all_of_it()):
        try:
            sys.exit(_exit_code())
        finally:
            sys.stdout.flush()  # here, where a closed reader is handled


_EXTRAS = {"psycopg": "shared", "deltalake": "publish"}
"""The extra of pyproject.toml for packages that `all` does not contain."""


def _exit_code() -> int:
    try:
        code = app(prog_name="stallscope", standalone_mode=False)
    except UsageError as error:
        if not is_help(error):
            raise BadInput(usage_line(error, command=_typed_command())) from error
        code = app([*sys.argv[1:], "--help"], prog_name="stallscope", standalone_mode=False)
    except typer.Abort:
        code = 1
    return code if isinstance(code, int) else 0


def _typed_command() -> str:
    """The command in the arguments, such as "stallscope hub token"."""
    command: Any = typer.main.get_command(app)
    words = ["stallscope"]
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        words.append(word)
    return " ".join(words)


def _open_closed_streams() -> None:
    """Replace standard streams that the caller has closed (`>&-`, some supervisors) by /dev/null.

    Python sets them to None, and the next opened file would take their number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        fd = os.open(os.devnull, os.O_RDWR)
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
        stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


class _Output(io.FileIO):
    """Standard output that remembers a failed write: the error of a full disk does not name its file."""

    has_failed = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write as FileIO does. Raises OSError."""
        try:
            return super().write(data)
        except OSError:
            self.has_failed = True
            raise


def _write_all_of_it() -> _Output | None:
    """Put a buffer before standard output, even if PYTHONUNBUFFERED has removed it. None for an output in memory.

    Without a buffer Python ignores partial writes to a pipe: long output would lose its end.
    """
    buffer = getattr(sys.stdout, "buffer", None)
    if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        return None
    sys.stdout.flush()
    output = _Output(sys.stdout.fileno(), "w", closefd=False)
    is_by_line = bool(sys.stdout.line_buffering) or buffer is getattr(buffer, "raw", buffer)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(output), encoding, errors, line_buffering=is_by_line)
    return output


@contextmanager
def _one_line_errors(output: _Output | None) -> Iterator[None]:
    try:
        yield
    except StallscopeError as error:
        # One line, and no control of the terminal, whatever is in the name of a file.
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(error))
        echo_text(f"stallscope: {text}", err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "stallscope"):
            raise
        remedy = remedy_for_extra(_EXTRAS.get(package, "all"))
        print(f"stallscope: this command needs the package {package}: {remedy}", file=sys.stderr)
        sys.exit(BadInput.exit_code)
    except BrokenPipeError:
        _leave_without_reader()
    except SystemExit as end:
        # click and rich turn it into an exit with 1.
        if isinstance(end.__context__, BrokenPipeError):
            _leave_without_reader()
        raise
    except OSError as error:  # of the machine, where no command expected it
        is_of_output = _output_is_lost() or (error.filename is None and output and output.has_failed)
        subject = "standard output" if is_of_output else error.filename
        parts = ("stallscope", subject, error.strerror or error)
        print(masked(": ".join(str(part) for part in parts if part)), file=sys.stderr)
        sys.exit(StorageFailed.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _output_is_lost() -> bool:
    """Whether the remaining output cannot be written: a full disk, for example. It is then dropped."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        return True
    return False


def _leave_without_reader() -> NoReturn:
    """The reader of the output has closed it (a pager, head): end like a program that SIGPIPE ends."""
    _drop_output()
    sys.exit(141)


def _drop_output() -> None:
    """Let the remaining buffer go to /dev/null: it would raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
