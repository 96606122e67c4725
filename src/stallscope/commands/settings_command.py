"""`stallscope settings`: the effective values and their sources."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from stallscope.commands.options import AsJson, SettingsFile


def settings(
    name: Annotated[str | None, typer.Argument(help="Print only the value of this setting.")] = None,
    as_json: AsJson = False,
    path: SettingsFile = None,
) -> None:
    """Print the effective settings and the source of each value."""
    from stallscope.settings import TABLE, effective, named, shown

    values = effective({}, os.environ, path)
    if name is not None:
        value = shown(named(name), getattr(values.settings, name))
        typer.echo(json.dumps(value) if as_json else _text(value))
        return
    if as_json:
        data = {
            setting.name: {
                "value": shown(setting, getattr(values.settings, setting.name)),
                "from": values.origins[setting.name],
                "environment": setting.environment,
                "flag": setting.flag or None,
            }
            for setting in TABLE
        }
        typer.echo(json.dumps(data, indent=2))
        return
    rows = [
        (s.name, _text(shown(s, getattr(values.settings, s.name))), values.origins[s.name]) for s in TABLE
    ]
    width = [max(len(row[i]) for row in rows) for i in range(2)]
    for key, value, origin in rows:
        typer.echo(f"{key.ljust(width[0])}  {value.ljust(width[1])}  {origin}")


def _text(value: object) -> str:
    """Empty for a setting without a value."""
    return "" if value is None else str(value)
