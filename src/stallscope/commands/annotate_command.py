"""`stallscope annotate`: labels for the running trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.options import SettingsFile, settings_from
from stallscope.errors import BadInput, NotFound


def annotate(
    labels: Annotated[
        list[str], typer.Argument(help="LABEL=VALUE, one or more: step=100, epoch=3, phase=evaluation.")
    ],
    pid: Annotated[
        int,
        typer.Option(min=0, help="The process that the label describes; 0: all processes of this machine."),
    ] = 0,
    socket: Annotated[Path | None, typer.Option("--annotate-socket", help="Socket of the agent.")] = None,
    settings: SettingsFile = None,
) -> None:
    """Annotate the running trace with the step or phase of a job."""
    from stallscope.annotate import send_labels

    chosen = settings_from({"annotate_socket": socket}, settings)
    messages = [_label(text, pid) for text in labels]
    try:
        answers = send_labels(messages, str(chosen.annotate_socket))
    except FileNotFoundError:
        raise NotFound(
            f"no agent listens at {chosen.annotate_socket}; start `stallscope trace`, or pass its --annotate-socket"
        ) from None
    except OSError as error:
        raise NotFound(
            f"cannot reach the agent at {chosen.annotate_socket}: {error.strerror or error}; "
            "it accepts labels from its own user and from --annotate-group"
        ) from None
    for text, answer in zip(labels, answers, strict=True):
        if answer != "ok":
            raise BadInput(f"{text}: {answer}")


def _label(text: str, pid: int) -> dict[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BadInput(f"{text!r} is not a label; give LABEL=VALUE, for example step=100")
    return {"label": name, "value": value, "pid": pid}
