"""Refuses values that cannot be meant: empty values, and "-" for a file that cannot be a standard stream.

In a script an empty value comes from a variable that is not set. An empty path would name the current folder, and an
empty filter would select all rows.
"""

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from stallscope.errors import BadInput

_JOB = "command"
"""The argument with the command of a job: its words belong to the job."""

_STREAMS = ("sql", "out", "output")
"""Parameters for which "-" is standard input or output."""


class CheckedCommand(TyperCommand):
    """A command that accepts an empty value only where it is the default, and so has a meaning."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. Raises BadInput for a refused value."""
        _check(self.params, self.make_parser(ctx).parse_args(args=list(args))[0])
        return super().parse_args(ctx, args)


class CheckedGroup(TyperGroup):
    """The same for the options of a group, such as `stallscope hub --db FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words up to the command. Raises BadInput for a refused value."""
        _check(self.params, self.make_parser(ctx).parse_args(args=list(args))[0])
        return super().parse_args(ctx, args)


def check_commands(app: typer.Typer) -> None:
    """Let all commands of an app, and of the groups in it, refuse such values."""
    app.info.cls = CheckedGroup
    for command in app.registered_commands:
        command.cls = CheckedCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            check_commands(group.typer_instance)


def _check(parameters: list[Any], given: Mapping[str, Any]) -> None:
    for parameter in parameters:
        value = given.get(parameter.name)
        values = value if isinstance(value, list | tuple) else (value,)
        if parameter.name == _JOB:
            continue
        if "" in values and parameter.default != "":
            raise BadInput(f"{_named(parameter)} is empty; check the variable that contains it")
        if "-" in values and parameter.name not in _STREAMS:
            raise BadInput(
                f"{_named(parameter)} is -, which is not a file; give a path (./- for a file of this name)"
            )


def _named(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return f"the value of {max(parameter.opts, key=len)}"
    return f"the argument {parameter.name}"
