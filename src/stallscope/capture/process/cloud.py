"""The cloud metadata of this machine: instance, type, zone. Queried only if a setting enables it.

From the metadata service that each cloud has at a fixed address of the machine's own network. No proxy and no name
look-up is used, and an answer that takes longer than half a second is ignored. AWS IMDSv2, Google Compute Engine, Azure
IMDS.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

_ADDRESS = "http://169.254.169.254"
_TIMEOUT_S = 0.5
_MAX_BYTES = 64 << 10
_MAX_LENGTH = 128


def machine_metadata(cloud: str, address: str = _ADDRESS) -> dict[str, str]:
    """cloud, instance, type, zone and name of this machine from aws, gcp or azure; empty without an answer."""
    try:
        metadata = _METADATA_READERS[cloud](address)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    facts = {"cloud": cloud} | {name: _printable(value) for name, value in metadata.items()}
    return {name: value for name, value in facts.items() if value}


def _aws(address: str) -> dict[str, str]:
    """Instance metadata service, version 2: a token first (EC2 user guide, "Use IMDSv2")."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _fetch(f"{address}/latest/api/token", lifetime, method="PUT")
    document = json.loads(
        _fetch(
            f"{address}/latest/dynamic/instance-identity/document",
            {"X-aws-ec2-metadata-token": token.strip()},
        )
    )
    return {
        "instance": document["instanceId"],
        "type": document.get("instanceType", ""),
        "zone": document.get("availabilityZone", ""),
    }


def _gcp(address: str) -> dict[str, str]:
    """Compute Engine metadata server; types and zones come as paths, and only the last part is used."""
    url = f"{address}/computeMetadata/v1/instance/?recursive=true"
    document = json.loads(_fetch(url, {"Metadata-Flavor": "Google"}))
    return {
        "instance": str(document["id"]),
        "type": document.get("machineType", "").rpartition("/")[2],
        "zone": document.get("zone", "").rpartition("/")[2],
        "name": document.get("name", ""),
    }


def _azure(address: str) -> dict[str, str]:
    """Azure Instance Metadata Service."""
    url = f"{address}/metadata/instance/compute?api-version=2021-02-01&format=json"
    document = json.loads(_fetch(url, {"Metadata": "true"}))
    zone = "-".join(part for part in (document.get("location", ""), document.get("zone", "")) if part)
    return {
        "instance": document["vmId"],
        "type": document.get("vmSize", ""),
        "zone": zone,
        "name": document.get("name", ""),
    }


_METADATA_READERS: Mapping[str, Callable[[str], dict[str, str]]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}


def _fetch(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    body = fetched(url, headers, method=method, timeout_s=_TIMEOUT_S, max_bytes=_MAX_BYTES)
    return body.decode()


def fetched(
    url: str, headers: Mapping[str, str], *, timeout_s: float, max_bytes: int, method: str = "GET"
) -> bytes:
    """The body of a local service's answer. Raises OSError.

    No proxy is used and no redirect is followed: both would take the headers, which may hold a token, elsewhere.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            body: bytes = response.read(max_bytes)
    except http.client.HTTPException as error:
        raise OSError(f"the answer is not HTTP, or is cut off ({type(error).__name__})") from error
    return body


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _printable(value: object) -> str:
    text = value if isinstance(value, str) else ""
    return "".join(c for c in text if c.isprintable())[:_MAX_LENGTH]
