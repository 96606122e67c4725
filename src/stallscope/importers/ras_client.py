"""Asks a running job's RAS service (NCCL 2.24 and newer) for its state, by the protocol of ncclras.

A client sends lines and reads one line for each, see rasClientEvent in src/ras/client_support.cc and src/ras/client.cc
(NVIDIA/nccl, commit 5067397c). The answer to STATUS ends when the service closes the connection. Services before 2.28
do not know SET FORMAT: they answer in text.
"""

import socket
import time
from dataclasses import replace

from stallscope.errors import BadInput, Unreachable
from stallscope.importers.ras_answer import Answer, answers_in

DEFAULT_ADDRESS = "localhost:28028"
"""NCCL_RAS_CLIENT_PORT; the environment variable NCCL_RAS_ADDR of the job changes it."""

_TIMEOUT_S = 40.0  # the service collects for at most 5 s per leg
_MAX_BYTES = 200 << 20


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of HOST:PORT or [IPv6]:PORT. Raises BadInput."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadInput(f"--ras-address: {address!r} is not HOST:PORT; give for example {DEFAULT_ADDRESS}")
    return host.strip("[]"), int(port)


def ask(address: str, *, timeout_s: float = _TIMEOUT_S) -> Answer:
    """The state of the job at this moment. Raises Unreachable where no RAS service answers, BadTrace."""
    try:
        with socket.create_connection(host_and_port(address), timeout=timeout_s) as connection:
            text = _answer(connection, time.monotonic() + timeout_s)
    except OSError as error:
        raise Unreachable(
            f"cannot ask the RAS service at {address} ({error.strerror or error}): run this on a node of the job, "
            "and check NCCL_RAS_ENABLE and NCCL_RAS_ADDR of the job"
        ) from error
    answers = answers_in(text, f"the answer of {address}")
    if not answers:
        raise Unreachable(f"the RAS service at {address} gave no complete answer: {text[:80]!r}; ask again")
    return replace(answers[-1], at_ns=time.time_ns())


def _answer(connection: socket.socket, deadline_s: float) -> str:
    """The answer to STATUS, in JSON where the service can."""
    with connection.makefile("rb") as stream:
        connection.sendall(b"CLIENT PROTOCOL 2\n")
        if not stream.readline(4096).upper().startswith(b"SERVER PROTOCOL "):
            raise OSError("not a RAS service: it did not answer with its protocol version")
        connection.sendall(b"SET FORMAT json\n")
        stream.readline(4096)  # OK, or ERROR by a service that answers in text
        connection.sendall(b"STATUS\n")
        parts, n_bytes = [], 0
        while part := stream.read1(1 << 16):
            parts.append(part)
            n_bytes += len(part)
            if n_bytes > _MAX_BYTES or time.monotonic() > deadline_s:
                raise OSError("the answer was too long or took too long")
    return b"".join(parts).decode("utf-8", "replace")
