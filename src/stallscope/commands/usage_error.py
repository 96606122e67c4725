"""One line for a wrong option, argument or command, in place of the usage text that typer prints."""

from typing import Any

import typer

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The root of these errors: click's class, of which newer versions of typer contain a copy."""

_PATH_ARGUMENTS = ("trace", "folder", "file", "before", "sources", "paths")


def is_help(error: Any) -> bool:
    """Whether the error only asks for the help page: a command without arguments."""
    return type(error).__name__ == "NoArgsIsHelpError"


def usage_line(error: Any, *, command: str) -> str:
    """The command, the complaint with the given value, and the command that lists the options.

    command: for errors of the parser, which do not contain it.
    """
    command = error.ctx.command_path if error.ctx else command
    complaint = " ".join(error.format_message().split()).rstrip(".").partition(", unable to parse")[0]
    complaint = complaint.replace("Value error, ", "").replace("(s)", "")
    given = _given(error)
    complaint += f", not {given}" if given and given not in complaint else ""
    complaint += _path_remedy(error, complaint)
    words = command.partition(" ")[2]
    end = "" if complaint.endswith("?") else ";"
    return f"{words + ': ' if words else ''}{complaint}{end} `{command} --help` lists the {_list(error)}"


def _given(error: Any) -> str:
    """The refused value in quotes; empty if the error does not name it."""
    errors = getattr(error.__cause__, "errors", None)
    value = errors()[0].get("input") if errors else None
    return f"{str(value)[:80]!r}" if isinstance(value, str | int | float) else ""


def _path_remedy(error: Any, complaint: str) -> str:
    """How to pass a path that was given as an argument, or with --db; empty for other complaints."""
    parameters = getattr(getattr(error.ctx, "command", None), "params", ())
    kinds = {each.name: each.param_type_name for each in parameters}
    if "unexpected extra argument" in complaint and kinds.get("db") == "option":
        return "; pass the trace with --db PATH"
    if not complaint.startswith("No such option: --db"):
        return ""
    if kinds.get("trace") == "option":
        return "; pass the trace with --trace PATH"
    is_argument = any(kinds.get(name) == "argument" for name in _PATH_ARGUMENTS)
    return f"; pass the path without an option: {error.ctx.command_path} PATH" if is_argument else ""


def _list(error: Any) -> str:
    return "commands" if getattr(getattr(error.ctx, "command", None), "commands", None) else "options"
