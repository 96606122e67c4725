"""`stallscope trace`: the agent of this machine."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import (
    Alerts,
    Db,
    SettingsFile,
    check_grpc_address,
    check_pair,
    duration_ns,
    settings_from,
)
from stallscope.errors import BadInput
from stallscope.terminal_text import echo_text

if TYPE_CHECKING:
    from stallscope.agent import Hub, Options
    from stallscope.capture.session import GpuTimes, OwnerOptions
    from stallscope.settings import Settings


def trace(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Start this job, trace only this job, and end when it ends: -- python train.py."),
    ] = None,
    db: Db = None,
    pid: Annotated[
        list[int] | None, typer.Option(help="Trace only this process and its children; may be repeated.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--duration", "-d", help="Stop after this time: 30s, 5m.")
    ] = None,
    max_db: Annotated[
        str | None,
        typer.Option("--max-db", help="Size limit; the oldest rows are deleted: 500M, 10G, 0: none."),
    ] = None,
    max_age: Annotated[
        str | None, typer.Option("--max-age", help="Age limit; older rows are deleted: 12h, 7d, 0: none.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="Name of this machine in the trace.")] = None,
    record_all: Annotated[bool, typer.Option("--record-all", help="Record every raw event (large).")] = False,
    prometheus: Annotated[
        str, typer.Option(help="Serve metrics for Prometheus at this address: 0.0.0.0:9464.")
    ] = "",
    otlp: Annotated[
        str,
        typer.Option(help="Send metrics and incidents by OTLP: HOST:4317 (gRPC), HOST:4318 (HTTP), a URL."),
    ] = "",
    serve: Annotated[
        str, typer.Option(help="Serve the trace to other machines and to assistants at ADDR:PORT: :8443.")
    ] = "",
    no_tls: Annotated[
        bool, typer.Option("--no-tls", help="Use clear text for --serve, the token included.")
    ] = False,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca", help="Require client certificates of this authority for --serve (PEM)."
        ),
    ] = None,
    hub: Annotated[
        str | None, typer.Option(help="Send to the hub at HOST:PORT (its port for OTLP over gRPC).")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token for sending to the hub.")
    ] = None,
    ca_cert: Annotated[
        Path | None,
        typer.Option("--ca-cert", help="Authority that signed the hub's certificate (PEM)."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Name of the cluster, sent to the hub.")] = None,
    client_cert: Annotated[
        Path | None,
        typer.Option("--client-cert", help="Client certificate, for a hub that requires it (PEM)."),
    ] = None,
    client_key: Annotated[Path | None, typer.Option("--client-key", help="Key of that certificate.")] = None,
    hub_insecure: Annotated[
        bool, typer.Option("--hub-insecure", help="Send in clear text, the token included.")
    ] = False,
    probe_budget: Annotated[
        float | None,
        typer.Option(
            "--probe-budget",
            help="CPU budget of high-frequency probes, in percent of a thread's time; 0: do not attach them.",
        ),
    ] = None,
    hook_budget: Annotated[
        float | None, typer.Option("--hook-budget", hidden=True, help="Former name of --probe-budget.")
    ] = None,
    annotate_socket: Annotated[
        Path | None, typer.Option("--annotate-socket", help="Socket for labels from jobs (step, phase).")
    ] = None,
    annotate_group: Annotated[
        str | None, typer.Option("--annotate-group", help="Group whose users may also send labels.")
    ] = None,
    no_stacks: Annotated[
        bool, typer.Option("--no-stacks", help="Do not record call stacks of blocked threads.")
    ] = False,
    gpu_ioctls: Annotated[
        bool,
        typer.Option("--gpu-ioctls", help="Count calls into the GPU driver by any process (experimental)."),
    ] = False,
    gpu_times: Annotated[
        str | None,
        typer.Option(
            "--gpu-times", help="When NCCL's profiler plugin records in jobs that load it: sample, on, off."
        ),
    ] = None,
    alerts: Alerts = None,
    event_socket: Annotated[
        Path | None,
        typer.Option("--event-socket", help="Socket that sends changes of incidents to local programs."),
    ] = None,
    ras: Annotated[
        bool,
        typer.Option(
            "--ras", help="Poll NCCL's RAS service instead, and name ranks that stay behind (no root)."
        ),
    ] = False,
    ras_address: Annotated[
        str, typer.Option("--ras-address", help="HOST:PORT of the service: NCCL_RAS_ADDR of the job.")
    ] = "localhost:28028",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every record as a line of JSON instead of the page.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only notable events, for use as a service.")
    ] = False,
    settings: SettingsFile = None,
) -> None:
    """Trace this machine's GPU jobs with eBPF until Ctrl-C (root).

    A terminal shows a live page of the job; other outputs get one line per second.
    """
    environment = dict(os.environ)
    # Before numpy is imported: each of its linear-algebra threads would be another thread with our privileges.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from stallscope import agent
    from stallscope.capture.probes import preflight
    from stallscope.commands import job_process
    from stallscope.diagnose import thresholds_of

    flags = {
        "db": db,
        "max_db_bytes": max_db,
        "max_age_s": max_age,
        "node": node,
        "hub": hub,
        "hub_token_file": token_file,
        "hub_ca_file": ca_cert,
        "cluster": cluster,
        "hub_client_cert": client_cert,
        "hub_client_key": client_key,
        "probe_budget_percent": hook_budget if probe_budget is None else probe_budget,
        "annotate_socket": annotate_socket,
        "annotate_group": annotate_group,
        "stacks": 0 if no_stacks else None,
        "gpu_ioctls": 1 if gpu_ioctls else None,
        "gpu_times": gpu_times,
        "alerts": alerts,
        "event_socket": event_socket,
    }
    chosen = settings_from(flags, settings)
    duration_s = None if duration is None else duration_ns(duration, "--duration") / 1e9
    if ras:
        from stallscope.commands.trace_ras import watch

        watch(ras_address, settings=chosen, duration_s=duration_s, as_json=as_json)
        return
    options = agent.Options(
        db=chosen.db,
        node=chosen.node,
        max_db_bytes=chosen.max_db_bytes,
        max_age_s=chosen.max_age_s,
        owner_max_age_s=chosen.owner_max_age_s,
        pids=tuple(pid or ()),
        duration_s=duration_s,
        probe_budget=chosen.probe_budget_percent / 100,
        record_all=record_all,
        notes_only=quiet or as_json,
        annotate_socket=chosen.annotate_socket,
        annotate_group=chosen.annotate_group,
        stacks=bool(chosen.stacks),
        gpu_ioctls=bool(chosen.gpu_ioctls),
        cloud=_cloud(chosen.cloud),
        owners=_owners(chosen),
        gpu_times=_gpu_times(chosen.gpu_times),
        engine_metrics_s=chosen.engine_metrics_s,
        engine_spans_port=chosen.engine_spans_port,
        prometheus=prometheus,
        otlp=otlp,
        serve=serve,
        serve_words=_serve_words(serve, no_tls=no_tls, client_ca=tls_client_ca),
        hub=_hub(chosen, is_insecure=hub_insecure),
        confined=True,
        thresholds=asdict(thresholds_of(chosen)),
        usd_per_gpu_hour=chosen.usd_per_gpu_hour,
        alerts=_valid(chosen.alerts),
        event_socket=chosen.event_socket,
    )
    if pid and command:
        raise BadInput("--pid and a command exclude each other; give only one")
    for number in pid or ():
        echo_text(f"stallscope: {job_process.described(number)}", err=True)
    shows = as_json or (not quiet and _has_screen())
    run = partial(_show, chosen=chosen, as_json=as_json) if shows else agent.trace
    if not command:
        run(options)
        return
    preflight.check()
    begin_ns = time.time_ns()
    with job_process.waiting(command, environment) as job:
        run(replace(options, pids=(job.pid,), ready=job.start), stop=job.ended)
        _print_summary(chosen, since_ns=begin_ns)
        code = job.exit_code()
    raise typer.Exit(code)


def _print_summary(chosen: Settings, *, since_ns: int) -> None:
    """The answer on the job traced since then, in less than a screen; without usable data the reason."""
    from stallscope.commands.compare import report_on
    from stallscope.commands.job_report import as_screen, of_report
    from stallscope.errors import StallscopeError
    from stallscope.store import node
    from stallscope.store.time_range import Part

    try:
        trace = node.read(chosen.db, part=Part(from_wall_ns=since_ns))
        echo_text(as_screen(of_report(report_on(trace, chosen), str(chosen.db))), err=True)
    except StallscopeError as error:
        echo_text(f"stallscope: no summary of the job: {error}", err=True)
    echo_text(f"stallscope: for the verdict: stallscope explain --db {chosen.db}", err=True)


def _cloud(name: str) -> str:
    """Raises BadInput for an unknown cloud."""
    if name not in ("", "aws", "gcp", "azure"):
        raise BadInput(f"cloud: {name!r} is not known; choose aws, gcp or azure, or leave it empty")
    return name


def _gpu_times(mode: str) -> GpuTimes:
    """Raises BadInput for an unknown mode."""
    from stallscope.capture.session import GpuTimes

    try:
        return GpuTimes(mode)
    except ValueError:
        raise BadInput(f"--gpu-times: {mode!r} is not known; choose sample, on or off") from None


def _owners(chosen: Settings) -> OwnerOptions:
    """Raises BadInput for an unknown scheduler or label."""
    from stallscope.capture.session import OwnerOptions, Privacy, owner_sources

    options = OwnerOptions(
        kinds=chosen.owners,
        node=chosen.owners_node or chosen.node,
        slurm_address=chosen.slurm_address,
        kubernetes_address=chosen.kubernetes_address,
        ray_address=chosen.ray_address,
        tags=chosen.owner_tags,
        privacy=Privacy.of(chosen.owner_drop, chosen.owner_hash, chosen.owner_hash_key),
        idle_after_ns=int(chosen.idle_after_s * 1e9),
    )
    owner_sources(options)
    return options


def _valid(alerts: Path | None) -> Path | None:
    """The file of alerts. Raises NotFound, BadInput before anything is traced."""
    if alerts:
        from stallscope.alerts.config import load

        load(alerts)
    return alerts


def _serve_words(serve: str, *, no_tls: bool, client_ca: Path | None) -> tuple[str, ...]:
    """Options for `stallscope serve`. Raises BadInput for serve options without --serve."""
    words: tuple[str, ...] = ("--no-tls",) if no_tls else ()
    words += ("--tls-client-ca", str(client_ca)) if client_ca else ()
    if words and not serve:
        raise BadInput(f"{words[0]} needs --serve ADDR:PORT; without --serve it has no effect")
    return words


def _has_screen() -> bool:
    """Whether the page can be drawn: a terminal that can move its cursor."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _show(options: Options, *, chosen: Settings, as_json: bool, stop: threading.Event | None = None) -> None:
    """Trace, with a sidecar process that shows the new records."""
    from stallscope import agent
    from stallscope.capture.probes import preflight
    from stallscope.live.viewer import viewer_process

    # Refused before the page is drawn, which would cover the message.
    preflight.check()
    preflight.check_pids(options.pids)
    with viewer_process(
        chosen.db,
        is_json=as_json,
    ) as notes:
        agent.trace(
            replace(options, notes_only=True, prints_verdicts=False),
            out=sys.stderr if as_json else notes,
            stop=stop,
        )


def _hub(chosen: Settings, *, is_insecure: bool) -> Hub | None:
    """The hub of the settings; None without a hub. Raises BadInput for incomplete settings."""
    from stallscope.agent import Hub

    if not chosen.hub:
        return None
    check_grpc_address(chosen.hub, "--hub")
    if chosen.hub_token_file is None:
        raise BadInput(
            "--hub needs --token-file: the hub accepts data only with a token (stallscope hub token create)"
        )
    if is_insecure and (chosen.hub_ca_file or chosen.hub_client_cert):
        raise BadInput("--hub-insecure and a certificate exclude each other; give only one")
    check_pair(chosen.hub_client_cert, chosen.hub_client_key)
    return Hub(
        address=chosen.hub,
        token_file=chosen.hub_token_file,
        cluster=chosen.cluster,
        ca_file=chosen.hub_ca_file,
        client_cert=chosen.hub_client_cert,
        client_key=chosen.hub_client_key,
        insecure=is_insecure,
        hosts=tuple(filter(None, (host.strip() for host in chosen.hub_hosts.split(",")))),
        max_spool_bytes=chosen.hub_spool_bytes,
    )
