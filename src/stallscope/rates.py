"""Prices of GPUs by the hour: a table of provider x GPU model x US dollars.

The shipped table (rates.yaml) holds on-demand list prices of a stated day; a user's own file replaces it. A price
that is not in the table is unknown and never zero.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from stallscope.errors import BadInput, NotFound, unreadable, yaml_complaint

SHIPPED = Path(__file__).with_name("rates.yaml")
ANY = "any"
"""The provider whose prices are used if the provider is not known."""

MAX_USD_PER_HOUR = 1_000.0
"""A higher price counts as a mistake (of a whole machine, of another currency)."""

_KEYS = {"as_of", "providers", "rates"}


@dataclass(frozen=True)
class Rate:
    """One entry: the price of one GPU of a model at a provider, US dollars per hour."""

    provider: str
    gpu: str
    usd_per_hour: float


@dataclass(frozen=True)
class AppliedRate:
    """The entry that applies to a GPU. how: the provider's own price, or the price of `any` as fallback."""

    rate: Rate
    how: Literal["provider", "fallback"]


@dataclass(frozen=True)
class RateTable:
    """All prices. as_of: the day of the prices. aliases: other names of providers, normalised. origin: the file."""

    as_of: str
    rates: tuple[Rate, ...]
    aliases: Mapping[str, str]
    origin: str


def load(path: Path | None = None) -> RateTable:
    """The table of a file, or the shipped table. Raises NotFound, or BadInput that names the wrong key."""
    import yaml  # here, because most commands need no prices

    source = path or SHIPPED
    try:
        data = yaml.safe_load(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"{source}: the price file does not exist; name another with --rates") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{source}: the price file cannot be read ({unreadable(error)})") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{source}: not valid YAML ({yaml_complaint(error)})") from error
    return validated(data, str(source))


def validated(data: Any, origin: str) -> RateTable:
    """The table that the content of a file describes. Raises BadInput that names the first wrong key."""
    if not isinstance(data, dict):
        raise BadInput(f"{origin}: a price file has the keys as_of, providers and rates")
    if unknown := sorted(str(key) for key in data if key not in _KEYS):
        raise BadInput(
            f"{origin}: unknown key {unknown[0]!r} in a price file; the keys are as_of, providers and rates"
        )
    aliases = _aliases(_mapping(data, "providers", origin), origin)
    rates = _rates(_mapping(data, "rates", origin), aliases, origin)
    if not rates:
        raise BadInput(f"{origin}: rates: no price; give provider, GPU model and US dollars per hour")
    return RateTable(_day(data.get("as_of"), origin), rates, aliases, origin)


def lookup(table: RateTable, *, gpu: str | None, provider: str | None = None) -> AppliedRate | None:
    """The price of a GPU, by the name its driver reports and any name of the provider; None if unknown.

    A slice of a GPU (MIG) costs less than the whole: it has a price only if the table names it.
    """
    if not gpu:
        return None
    own = known_provider(table, provider)
    for asked in dict.fromkeys((own, ANY) if own else (ANY,)):
        fitting = [r for r in table.rates if r.provider == asked and _fits(r.gpu, gpu)]
        if fitting:
            best = max(fitting, key=lambda rate: len(_words(rate.gpu)))
            return AppliedRate(best, "provider" if asked != ANY else "fallback")
    return None


@dataclass(frozen=True)
class ListedPrice:
    """A price from the table of rates."""

    usd_per_hour: float
    gpu: str
    provider: str
    as_of: str
    origin: str

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.usd_per_hour:.2f} USD per GPU hour, the list price of {self.gpu} ({self.provider}) "
            f"as of {self.as_of}; yours: --usd-per-gpu-hour or --rates."
        )


def listed(
    seen_gpu: str, path: Path | None, *, named_gpu: str = "", provider: str = ""
) -> ListedPrice | None:
    """The price of a GPU by the table of a file, or the shipped table; None if the GPU is not known.

    named_gpu: a user's own name for it, which has precedence over the trace. Raises NotFound for a named GPU
    without a price, an unknown provider or a missing file, BadInput for a broken table.
    """
    gpu = named_gpu or seen_gpu
    if not gpu and path is None and not provider:
        return None
    table = load(path)
    check_provider(table, provider)
    listed_rate = lookup(table, gpu=gpu, provider=provider or None)
    if listed_rate is None and named_gpu:
        raise NotFound(f"{table.origin} has no price for {gpu!r}: `stallscope rates` lists all prices")
    if listed_rate is None:
        return None
    return ListedPrice(
        listed_rate.rate.usd_per_hour,
        listed_rate.rate.gpu,
        listed_rate.rate.provider,
        table.as_of,
        table.origin,
    )


def check_provider(table: RateTable, name: str) -> None:
    """Raises NotFound for a provider that the table does not name; empty: any provider."""
    if name and _normal(name) != ANY and known_provider(table, name) is None:
        known = ", ".join(sorted({rate.provider for rate in table.rates}))
        raise NotFound(f"{table.origin} has no provider {name!r}; the providers are {known}")


def known_provider(table: RateTable, name: str | None) -> str | None:
    """The provider's name in the table, from any of its names; None if it is not in the table."""
    return table.aliases.get(_normal(name)) if name else None


def _fits(model: str, gpu: str) -> bool:
    words, model_words = _words(gpu), _words(model)
    return model_words <= words and ("mig" in words) == ("mig" in model_words)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9.]+", name.lower()))


def _normal(name: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def _mapping(data: Mapping[str, Any], key: str, origin: str) -> dict[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise BadInput(f"{origin}: {key}: must be a mapping of names")
    return value


def _aliases(providers: Mapping[str, Any], origin: str) -> dict[str, str]:
    """Every name of every provider, normalised -> the provider."""
    aliases: dict[str, str] = {}
    for provider, others in providers.items():
        if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
            raise BadInput(f"{origin}: providers: {provider}: must be a list of other names of this provider")
        for name in (provider, *others):
            if aliases.setdefault(_normal(name), provider) != provider:
                raise BadInput(
                    f"{origin}: providers: {name!r} is a name of both {aliases[_normal(name)]} and {provider}"
                )
    return aliases


def _rates(providers: Mapping[str, Any], aliases: dict[str, str], origin: str) -> tuple[Rate, ...]:
    """The entries. A provider without aliases is added to `aliases` under its own name."""
    rates: dict[tuple[str, frozenset[str]], Rate] = {}
    for name, models in providers.items():
        provider = ANY if name == ANY else aliases.setdefault(_normal(name), name)
        if not isinstance(models, dict):
            raise BadInput(f"{origin}: rates: {name}: must map GPU models to US dollars per hour")
        for model, usd in models.items():
            where = f"{origin}: rates: {name}: {model}"
            if not isinstance(model, str) or not _words(model):
                raise BadInput(f"{where}: a GPU model is a name, such as H100 or A100 80GB")
            if isinstance(usd, bool) or not isinstance(usd, int | float) or not _plausible(usd):
                raise BadInput(
                    f"{where}: {usd!r} is not a price; give US dollars per GPU and hour, above 0"
                    f" and up to {MAX_USD_PER_HOUR:g}"
                )
            if (provider, _words(model)) in rates:
                raise BadInput(f"{where}: this provider and model already have a price; keep one of them")
            rates[provider, _words(model)] = Rate(provider, model, float(usd))
    return tuple(rates.values())


def _plausible(usd: float) -> bool:
    return math.isfinite(usd) and 0 < usd <= MAX_USD_PER_HOUR


def _day(value: object, origin: str) -> str:
    if isinstance(value, date):
        return value.isoformat()[:10]
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise BadInput(f"{origin}: as_of: {value!r} is not a date; write it as 2025-06-30") from None
