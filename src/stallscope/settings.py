"""The settings: one table, from which flags, environment variables, the settings file and the docs are made.

A setting is one field of `Settings`, with its further properties next to its default. Flags have precedence over
the environment, the environment over the file, the file over the default. A name that is not in
the table is an error in every source. Thresholds of the diagnosis that rarely need a change are
"""

import difflib
import math
import platform
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from stallscope.credentials import masked
from stallscope.errors import NotFound, UnknownSetting, unreadable, yaml_complaint

DEFAULT_FILE = Path("/etc/stallscope/settings.yaml")
PREFIX = "STALLSCOPE_"
NOT_SETTINGS = frozenset({"STALLSCOPE_SETTINGS", "STALLSCOPE_DATA"})
"""Variables with the prefix that are not settings: the path of the settings file; the data of the tests."""

RENAMED = {"hook_budget_percent": "probe_budget_percent"}
"""Settings with a new name, by their former name, which the environment and the file accept for one release."""

LONGEST_S = 100 * 365 * 86_400
"""The longest duration that is accepted: in ns it fits into 64 bits, and the end of it is a date."""

MAX_BYTES = 9 * 10**18
"""The largest size that is accepted: it fits into the 64 bits of SQLite."""

MAX_NUMBER = 10**12
"""Limit of numbers without a limit of their own; products of them are finite and fit into 64 bits."""

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZES |= {unit.removesuffix("B"): n for unit, n in _SIZES.items() if len(unit) > 1}
_DURATIONS_S = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|sec|s|min|m|h|d|w)", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([a-z]*)", re.ASCII | re.IGNORECASE)
_FLEET = "fleet"
"""A key of the settings file that may hold the settings of `--nodes` as a mapping."""


@dataclass(frozen=True)
class About:
    """Properties of a setting besides its name, type and default. flag: empty if there is none.

    zero_means: the meaning of 0 where it is accepted below the minimum. is_secret: no output shows the value.
    """

    meaning: str
    flag: str = ""
    unit: str = ""
    environment: str = ""
    minimum: float | None = None
    maximum: float | None = None
    zero_means: str = ""
    is_secret: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of all settings. A field's name is its key in the settings file."""

    db: Annotated[Path, About("the node trace: written by trace, read by explain", "--db")] = Path(
        "/var/lib/stallscope/trace.db"
    )
    max_db_bytes: Annotated[
        int,
        About(
            "size of the node trace at which its oldest rows are pruned; 0: no limit",
            "--max-db",
            "bytes",
            environment="STALLSCOPE_MAX_DB",
            minimum=1_000_000,
            zero_means="no limit",
        ),
    ] = 10_000_000_000
    max_age_s: Annotated[
        int,
        About(
            "age at which rows of the node trace are pruned; 0: no limit",
            "--max-age",
            "s",
            environment="STALLSCOPE_MAX_AGE",
            minimum=60,
            zero_means="no limit",
        ),
    ] = 0
    node: Annotated[str, About("name of this machine in the trace; empty: its host name", "--node")] = ""
    stacks: Annotated[
        int,
        About(
            "1: store the code locations of blocked threads of traced processes; 0: no stacks, as --no-stacks",
            minimum=0,
            maximum=1,
        ),
    ] = 1
    gpu_ioctls: Annotated[
        int,
        About(
            "1: count calls into the GPU driver (ioctl) by process and number; experimental",
            "--gpu-ioctls",
            minimum=0,
            maximum=1,
        ),
    ] = 0
    gpu_times: Annotated[
        str,
        About(
            "when NCCL's profiler plugin records in traced processes that load it: sample (short windows within a "
            "budget of 0.2 % of their time), on, off",
            "--gpu-times",
        ),
    ] = "sample"
    engine_metrics_s: Annotated[
        int,
        About(
            "interval at which GET /metrics is sent to inference engines that listen at a loopback address of this "
            "machine; 0: never",
            unit="s",
            minimum=1,
            zero_means="no requests",
        ),
    ] = 10
    engine_spans_port: Annotated[
        int,
        About(
            "port at 127.0.0.1 on which the agent accepts the OTLP spans of inference engines (HTTP with protobuf); 0: "
            "none",
            minimum=1,
            maximum=65535,
            zero_means="no port",
        ),
    ] = 0
    annotate_socket: Annotated[
        Path,
        About("socket on which the agent accepts labels (step, epoch, phase) from jobs", "--annotate-socket"),
    ] = Path("/run/stallscope/annotate.sock")
    annotate_group: Annotated[
        str,
        About(
            "group whose users may send labels; empty: only the agent's own user and root", "--annotate-group"
        ),
    ] = ""
    cloud: Annotated[
        str,
        About(
            "cloud whose metadata service reports instance, type and zone of this machine: aws, gcp, azure; "
            "empty: none"
        ),
    ] = ""
    owners: Annotated[
        str,
        About(
            "schedulers that the agent asks for owners, separated by commas: slurm, kubernetes, kubelet, ecs, "
            "ray; empty: only control groups and environments",
        ),
    ] = ""
    owners_node: Annotated[
        str, About("name of this machine in the scheduler; empty: SLURMD_NODENAME, NODE_NAME, or its name")
    ] = ""
    slurm_address: Annotated[
        str, About("URL of slurmrestd's jobs, with the token in SLURM_JWT; empty: scontrol is run")
    ] = ""
    kubernetes_address: Annotated[
        str, About("https://HOST:PORT of the API or of the kubelet; empty: as the pod's environment states")
    ] = ""
    ray_address: Annotated[
        str, About("URL of Ray's dashboard, with a token in RAY_AUTH_TOKEN; empty: http://127.0.0.1:8265")
    ] = ""
    owner_tags: Annotated[
        str, About("labels and annotations of pods to keep, separated by commas: team, cost-center, ...")
    ] = ""
    owner_drop: Annotated[
        str, About("owner labels that are neither stored nor sent, separated by commas: user, tags, ...")
    ] = ""
    owner_hash: Annotated[
        str, About("owner labels that are replaced by a hash, separated by commas; needs owner_hash_key")
    ] = ""
    owner_hash_key: Annotated[
        str,
        About(
            "secret text for owner_hash; machines with the same text produce the same hash for equal values",
            is_secret=True,
        ),
    ] = ""
    owner_max_age_s: Annotated[
        int,
        About(
            "age at which agent and hub delete the owners of ended processes and jobs; 0: with the other rows",
            unit="s",
            minimum=60,
            zero_means="deletion with the other rows",
        ),
    ] = 0
    idle_after_s: Annotated[
        float,
        About(
            "GPUs that a job holds without using them are reported after this time; 0: not reported",
            unit="s",
            minimum=1,
            zero_means="no report",
        ),
    ] = 300.0
    probe_budget_percent: Annotated[
        float,
        About(
            "share of a thread's time that high-frequency probes (launches, events) may cost; beyond it they are on "
            "for a part of the time, and counts are estimates; 0: no such probes",
            "--probe-budget",
            "percent",
            minimum=0,
            maximum=100,
        ),
    ] = 0.5
    hang_after_s: Annotated[
        float,
        About(
            "a rank that its peers wait for is reported as hung only after this time", unit="s", minimum=0.1
        ),
    ] = 10.0
    hang_gap_factor: Annotated[
        float,
        About(
            "and only after this many times the job's typical gap between rounds",
            unit="times",
            minimum=1,
        ),
    ] = 5.0
    cause_share: Annotated[
        float,
        About(
            "share of the excess time that must be explained before a cause is named",
            unit="0 to 1",
            minimum=0.5,
            maximum=1,
        ),
    ] = 0.8
    min_late_ms: Annotated[
        float, About("smaller delays are never reported", "--min-late", "ms", minimum=0)
    ] = 2.0
    min_late_steps: Annotated[int, About("late steps before a rank is named", unit="steps", minimum=1)] = 3
    usd_per_gpu_hour: Annotated[
        float | None,
        About(
            "price of one GPU for one hour; without it the cost is reported in GPU seconds only",
            "--usd-per-gpu-hour",
            "USD per hour",
            minimum=0,
        ),
    ] = None
    gpu: Annotated[
        str,
        About("GPU model for the price, as its driver names it; empty: the model in the trace", "--gpu"),
    ] = ""
    provider: Annotated[
        str, About("provider for the price: aws, gcp, or another of the list; empty: any", "--provider")
    ] = ""
    rates: Annotated[
        Path | None,
        About(
            "file with the price of a GPU hour by provider and model; without it: the shipped list", "--rates"
        ),
    ] = None
    nodes: Annotated[
        str,
        About(
            "agents that query, explain and export connect to, HOST:PORT,HOST:PORT; empty: none", "--nodes"
        ),
    ] = ""
    nodes_token_file: Annotated[
        Path | None, About("file with the token for these agents", "--token-file")
    ] = None
    nodes_ca_file: Annotated[
        Path | None,
        About("authorities that signed the agents' certificates; without it the system's", "--ca-cert"),
    ] = None
    nodes_client_cert: Annotated[
        Path | None, About("client certificate, for agents that require one", "--client-cert")
    ] = None
    nodes_client_key: Annotated[Path | None, About("key of the client certificate", "--client-key")] = None
    hub: Annotated[
        str, About("hub that the agent sends to, HOST:PORT of its OTLP over gRPC; empty: none", "--hub")
    ] = ""
    cluster: Annotated[str, About("name of the cluster of this machine, sent to the hub", "--cluster")] = (
        "default"
    )
    hub_token_file: Annotated[
        Path | None, About("file with the agent's token for the hub", "--token-file")
    ] = None
    hub_ca_file: Annotated[
        Path | None,
        About("authority that signed the hub's certificate; without it the system's", "--ca-cert"),
    ] = None
    hub_client_cert: Annotated[
        Path | None, About("the agent's certificate, for a hub that requires one", "--client-cert")
    ] = None
    hub_client_key: Annotated[Path | None, About("key of the agent's certificate", "--client-key")] = None
    hub_hosts: Annotated[
        str,
        About(
            "other hosts, separated by commas, to which hubs that share their data may direct this agent and its"
            " token: names, addresses or *.DOMAIN; empty: only the host of the setting hub"
        ),
    ] = ""
    hub_spool_bytes: Annotated[
        int,
        About(
            "limit for data that waits on disk for the hub; beyond it the oldest is dropped and counted",
            unit="bytes",
            minimum=1_000_000,
        ),
    ] = 200_000_000
    hub_db: Annotated[Path, About("the hub's folder: data, tokens, audit log; `hub --db`")] = Path(
        "/var/lib/stallscope/hub"
    )
    hub_max_age_s: Annotated[
        int,
        About("age at which the hub deletes rows, closed verdicts and ended jobs", unit="s", minimum=3600),
    ] = 7_776_000
    hub_shared: Annotated[
        str,
        About(
            "PostgreSQL of hubs that share their data, postgresql://USER@HOST:PORT/DATABASE; empty: one hub alone",
            "--shared",
        ),
    ] = ""
    hub_bucket: Annotated[
        str, About("bucket of hubs that share their data, s3://BUCKET/PREFIX", "--bucket")
    ] = ""
    hub_peer: Annotated[str, About("address for other hubs, ADDR:PORT", "--peer")] = ":4319"
    hub_peer_host: Annotated[
        str, About("name or address at which other hubs reach this hub; empty: its host name", "--peer-host")
    ] = ""
    hub_direct: Annotated[
        str,
        About(
            "address HOST:PORT at which agents of the hub's own clusters send to it directly; empty: agents send to"
            " any hub, which forwards the rows",
            "--direct",
        ),
    ] = ""
    hub_lease_s: Annotated[
        float, About("time after which another hub takes over from a silent hub", unit="s", minimum=1)
    ] = 10.0
    hub_cache_bytes: Annotated[
        int, About("size of the cache of sealed files in --db", unit="bytes", minimum=1_000_000)
    ] = 100_000_000_000
    hub_otlp_grpc: Annotated[
        str, About("address at which the hub receives OTLP over gRPC, ADDR:PORT", "--otlp-grpc")
    ] = ":4317"
    hub_otlp_http: Annotated[
        str, About("address at which the hub receives OTLP over HTTP, ADDR:PORT", "--otlp-http")
    ] = ":4318"
    hub_api: Annotated[str, About("address of the hub's API and page, ADDR:PORT", "--api")] = ":8081"
    hub_tls_cert: Annotated[
        Path | None, About("the hub's certificate with its chain (PEM)", "--tls-cert")
    ] = None
    hub_tls_key: Annotated[Path | None, About("key of the hub's certificate (PEM)", "--tls-key")] = None
    hub_tls_client_ca: Annotated[
        Path | None,
        About(
            "authority of the senders' certificates; without it senders need no certificate",
            "--tls-client-ca",
        ),
    ] = None
    hub_memory_bytes: Annotated[
        int | None,
        About(
            "memory that the hub may use, with its processes for the diagnosis and for SQL (docs/hub.md); "
            "without it a quarter of the machine's or container's memory",
            unit="bytes",
            minimum=1_000_000,
        ),
    ] = None
    alerts: Annotated[
        Path | None,
        About(
            "file with the receivers and routes of alerts (docs/alerts.md); without it: no alerts", "--alerts"
        ),
    ] = None
    event_socket: Annotated[
        Path | None,
        About(
            "socket on which the agent sends changes of incidents to local programs, as lines of JSON; "
            "without it: no socket",
            "--event-socket",
        ),
    ] = None
    hub_requests_per_minute: Annotated[
        int, About("requests per token to the hub's API", unit="a minute", minimum=1)
    ] = 1200
    hub_public_url: Annotated[
        str, About("address of the hub as browsers see it, https://HOST:PORT; for sign-in with a provider")
    ] = ""
    hub_oidc_issuer: Annotated[
        str, About("OpenID Connect issuer whose users may open the hub's page; empty: tokens only")
    ] = ""
    hub_oidc_client_id: Annotated[str, About("the hub's client id at the issuer")] = ""
    hub_oidc_secret_file: Annotated[
        Path | None, About("file with the hub's client secret; unset: a public client")
    ] = None
    hub_oidc_tenant: Annotated[str, About("tenant of the issuer's users")] = "default"
    hub_oidc_tenant_claim: Annotated[
        str, About("claim that names a user's tenant; empty: all users belong to hub_oidc_tenant")
    ] = ""
    hub_oidc_scopes: Annotated[str, About("scopes of the issuer's users: read, or read,sql")] = "read,sql"


@dataclass(frozen=True)
class Setting:
    """One entry of the table. `name` is the field of Settings and the key in the file."""

    name: str
    kind: type
    may_be_unset: bool
    default: Any
    about: About

    @property
    def flag(self) -> str:
        """The long option; empty where there is none."""
        return self.about.flag

    @property
    def environment(self) -> str:
        """The environment variable."""
        return self.about.environment or PREFIX + self.name.upper()


def _table() -> tuple[Setting, ...]:
    """The entries, from the fields of Settings."""
    hints = typing.get_type_hints(Settings, include_extras=True)
    entries = []
    for entry in fields(Settings):
        hint, about = typing.get_args(hints[entry.name])
        is_union = isinstance(hint, types.UnionType)
        kind = typing.get_args(hint)[0] if is_union else hint
        entries.append(Setting(entry.name, kind, is_union, entry.default, about))
    return tuple(entries)


TABLE = _table()


@dataclass(frozen=True)
class Effective:
    """The values of all settings and the origin of each, in words for a user."""

    settings: Settings
    origins: Mapping[str, str]


def effective(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    path: Path | None = None,
    *,
    host_name: str | None = None,
) -> Effective:
    """The values of all settings.

    flags: values by setting name, None where the flag was not given. environ: the process environment.
    path: the settings file named with --settings; by default STALLSCOPE_SETTINGS, or DEFAULT_FILE if it exists.
    Raises UnknownSetting for a name that is not in the table or a value that does not fit, NotFound for a
    named file that does not exist.
    """
    given: dict[str, tuple[Any, str]] = {}
    given |= _from_file(_settings_file(path, environ))
    given |= _from_environment(environ)
    given |= _from_flags(flags)
    values = {s.name: parsed(s, *given[s.name]) for s in TABLE if s.name in given}
    origins = {s.name: given[s.name][1] if s.name in given else "default" for s in TABLE}
    if not values.get("node"):
        values["node"] = host_name if host_name is not None else platform.node()
        origins["node"] = "host name"
    return Effective(Settings(**values), types.MappingProxyType(origins))


def named(name: str) -> Setting:
    """The entry of the table with this name. Raises UnknownSetting, with the closest name."""
    by_name = {setting.name: setting for setting in TABLE}
    if name not in by_name:
        raise _unknown(name, by_name, "settings")
    return by_name[name]


def parsed(setting: Setting, value: Any, origin: str) -> Any:
    """The value as the setting's type. origin: its source, for the message.

    Sizes in bytes may carry a unit: 500m, 10GB, 2GiB; durations in seconds as well: 30s, 7d. Raises UnknownSetting
    when it does not fit.
    """
    if value is None and setting.may_be_unset:
        return None
    try:
        result = _converted(setting, value)
    except (ValueError, TypeError, OverflowError, KeyError):
        wanted = _UNIT_WORDS.get(setting.about.unit, _KIND_WORDS[setting.kind])
        raise UnknownSetting(f"{_quoted(setting, value, origin)}; give a {wanted}") from None
    if complaint := _complaint(setting.about, result):
        raise UnknownSetting(f"{_quoted(setting, value, origin)}; {complaint}")
    return result


def shown(setting: Setting, value: Any) -> Any:
    """The value for output: a path as text, a secret masked, and a URL without its password."""
    if setting.about.is_secret and value:
        return "***"
    return masked(str(value)) if isinstance(value, str | Path) else value


def _quoted(setting: Setting, value: Any, origin: str) -> str:
    """The setting with the refused value, which may be a secret, for an error."""
    is_quoted = not setting.about.is_secret and not isinstance(value, list | dict)
    return f"{origin}: {setting.name} is {repr(value)[:80] if is_quoted else 'of another type'}"


def _complaint(about: About, value: Any) -> str:
    """The advice for a value outside the limits; empty for a value inside."""
    if about.zero_means and value == 0:
        return ""
    if about.minimum is not None and value < about.minimum:
        zero = f", or 0 for {about.zero_means}" if about.zero_means else ""
        return f"give {about.minimum:,.10g} or more{zero}"
    if about.unit == "s" and value > LONGEST_S:
        return "give at most 100 years"
    if about.unit == "bytes" and value > MAX_BYTES:
        return "give less than 9,000,000 TB"
    maximum = MAX_NUMBER if about.maximum is None else about.maximum
    if isinstance(value, int | float) and value > maximum:
        return f"give {maximum:,.10g} or less"
    return ""


_UNIT_WORDS = {
    "bytes": "size, such as 500M or 10GB",
    "s": "number of seconds or a duration, such as 30s or 7d",
}
_KIND_WORDS = {int: "whole number", float: "number", str: "text", Path: "path"}


def _converted(setting: Setting, value: Any) -> Any:
    """The value in the setting's type; ValueError or TypeError if it does not convert."""
    if isinstance(value, bool):
        raise TypeError
    if setting.about.unit == "bytes" and isinstance(value, str):
        return _size_bytes(value)
    if setting.about.unit == "s" and isinstance(value, str):
        value = duration_s(value)
    if setting.kind is float and not math.isfinite(float(value)):
        raise ValueError
    if setting.kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError
    if setting.kind is str and isinstance(value, list):
        value = ",".join(_only_text(item) for item in value)
    if setting.kind in (str, Path) and not isinstance(value, str | Path):
        raise TypeError
    if setting.kind is Path:
        if not str(value):
            raise ValueError
        return Path(value).expanduser()
    return setting.kind(value)


def _only_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _size_bytes(text: str) -> int:
    """Bytes of "10GB" and similar."""
    match = _SIZE.fullmatch(text.replace(" ", "").replace("_", ""))
    if not match:
        raise ValueError
    return round(float(match[1]) * _SIZES[match[2].upper()])


def duration_s(text: str) -> float:
    """Seconds of "30s", "7d", "1h30m" and similar; a number without a unit is in seconds. Raises ValueError."""
    compact = text.replace(" ", "").lower()
    if re.fullmatch(r"(\d+(\.\d*)?|\.\d+)", compact, re.ASCII):
        return float(compact)
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise ValueError
    return sum(float(number) * _DURATIONS_S[unit] for number, unit in parts)


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    by_name = {s.name: s for s in TABLE}
    for name in flags:
        if name not in by_name:
            raise _unknown(name, by_name, "flags")
    return {name: (value, by_name[name].flag or name) for name, value in flags.items() if value is not None}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """The values from the environment; empty variables are ignored."""
    by_variable = {s.environment: s for s in TABLE}
    by_variable |= {PREFIX + former.upper(): named(name) for former, name in RENAMED.items()}
    given = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS:
            continue
        if variable not in by_variable:
            raise _unknown(variable, by_variable, "environment")
        if environ[variable]:
            given[by_variable[variable].name] = (environ[variable], variable)
    return given


def _settings_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read; None if none is named and the default file does not exist."""
    named = path or environ.get("STALLSCOPE_SETTINGS")
    if named:
        return Path(named)
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def _from_file(path: Path | None) -> dict[str, tuple[Any, str]]:
    """The values from the file, with file and line as origin."""
    if path is None:
        return {}
    names = {s.name for s in TABLE}
    given: dict[str, tuple[Any, str]] = {}
    for name, value, line in _file_entries(path):
        origin = f"{path}:{line}"
        name = RENAMED.get(name, name)
        if name not in names:
            raise _unknown(name, names, origin)
        if name in given:
            raise UnknownSetting(f"{origin}: {name} was already set at {given[name][1]}; keep one of them")
        given[name] = (value, origin)
    return given


def _file_entries(path: Path) -> Iterable[tuple[str, Any, int]]:
    """Key, value and line of each entry of a YAML file that holds one flat mapping."""
    import yaml  # here, because most commands run without a file

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"{path}: the settings file does not exist; name another with --settings") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownSetting(f"{path}: the settings file cannot be read ({unreadable(error)})") from error
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UnknownSetting(f"{path}: not valid YAML ({yaml_complaint(error)})") from error
    if values is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UnknownSetting(f"{path}: the settings file must hold lines of the form `name: value`")
    entries = []
    for key, entry in root.value:
        name, value, line = str(key.value), values.get(key.value), key.start_mark.line + 1
        if name == _FLEET and isinstance(entry, yaml.MappingNode):
            for inner, _ in entry.value:
                at = inner.start_mark.line + 1
                entries.append((_of_fleet(str(inner.value), f"{path}:{at}"), value.get(inner.value), at))
        else:
            entries.append((name, value, line))
    return entries


def _of_fleet(key: str, origin: str) -> str:
    """The name of the setting that a key below `fleet:` means: `nodes`, or `token_file` for nodes_token_file."""
    names = {s.name: s.name for s in TABLE if s.name.startswith("nodes")}
    names |= {name.removeprefix("nodes_"): name for name in names}
    if key not in names:
        raise _unknown(key, names, f"{origin} (fleet)")
    return names[key]


def _unknown(name: str, known: Iterable[str], origin: str) -> UnknownSetting:
    """The refusal. It suggests the closest name, compared without the prefix that all variables share."""
    by_stem = {candidate.removeprefix(PREFIX): candidate for candidate in known}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), list(by_stem), n=1)
    advice = (
        f"did you mean {by_stem[close[0]]}?" if close else "docs/reference/settings.md lists all settings"
    )
    return UnknownSetting(f"{origin}: unknown setting {name}; {advice}")
