"""`stallscope rates`: prices of GPU hours, by provider and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import AsJson, Rates, SettingsFile, settings_from
from stallscope.errors import NotFound

if TYPE_CHECKING:  # importing it here would slow every command
    from stallscope.rates import Rate, RateTable


def rates(
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Show the price of this GPU, by the name its driver reports.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option("--provider", help="Use this provider's price, by any of its names.")
    ] = None,
    file: Rates = None,
    validate: Annotated[
        Path | None, typer.Option("--validate", help="Check a price file and report its errors.")
    ] = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """Show the prices of GPU hours.

    Nothing is downloaded. `explain` uses a price when the GPU is known (from --gpu or the trace) and
    --usd-per-gpu-hour is not given.
    """
    from stallscope import rates as table_of

    if validate is not None:
        checked = table_of.load(validate)
        n_providers = len({rate.provider for rate in checked.rates})
        typer.echo(
            f"{validate}: valid, {len(checked.rates)} prices of {n_providers} providers, as of {checked.as_of}"
        )
        return
    chosen = settings_from({"rates": file, "gpu": gpu, "provider": provider}, settings)
    table = table_of.load(chosen.rates)
    table_of.check_provider(table, chosen.provider)
    if chosen.gpu:
        _print_rate(table, chosen.gpu, chosen.provider, as_json=as_json)
        return
    only = table_of.known_provider(table, chosen.provider)
    shown = [rate for rate in table.rates if only in (None, rate.provider)]
    if as_json:
        rows = [{"provider": r.provider, "gpu": r.gpu, "usd_per_hour": r.usd_per_hour} for r in shown]
        typer.echo(json.dumps({"as_of": table.as_of, "origin": table.origin, "rates": rows}, indent=2))
        return
    _draw(shown)
    typer.echo(f"as of {table.as_of}, {table.origin}")


def _print_rate(table: RateTable, gpu: str, provider: str, *, as_json: bool) -> None:
    from stallscope.rates import lookup

    result = lookup(table, gpu=gpu, provider=provider or None)
    if result is None:
        raise NotFound(f"{table.origin} has no price for {gpu!r}; give your own price file with --rates")
    rate = result.rate
    if as_json:
        data = {
            "provider": rate.provider,
            "gpu": rate.gpu,
            "usd_per_hour": rate.usd_per_hour,
            "how": result.how,
        }
        typer.echo(json.dumps(data | {"as_of": table.as_of, "origin": table.origin}, indent=2))
        return
    seller = "any provider" if rate.provider == "any" else rate.provider
    typer.echo(f"{rate.usd_per_hour:.2f} USD per hour: {rate.gpu}, {seller}, as of {table.as_of}")


def _draw(shown: list[Rate]) -> None:
    from stallscope.commands.answer import Format, print_answer
    from stallscope.query.sql import Answer

    rows: list[tuple[object, ...]] = [(r.provider, r.gpu, f"{r.usd_per_hour:.2f}") for r in shown]
    print_answer(Answer(("provider", "gpu", "USD per hour"), rows), Format.TABLE)
