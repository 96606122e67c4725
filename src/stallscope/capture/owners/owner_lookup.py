"""The metadata of the owners of pods from the API of Kubernetes, each read once."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from stallscope.capture.owners.kube_api import Absent, KubeApi
from stallscope.capture.owners.owner_chain import Metadata

_MAX_OWNERS = 4096
_PAUSE_S = 60.0
"""Time without requests after a request that was not answered: each may last as long as its timeout."""


@dataclass
class OwnerLookup:
    """is_unanswered: the API did not answer a request since the caller set it to False."""

    api: KubeApi
    clock_s: Callable[[], float] = time.monotonic
    is_unanswered: bool = False
    _owners: dict[tuple[str, str, str], Metadata | None] = field(default_factory=dict)
    _after_s: float = float("-inf")

    @property
    def is_paused(self) -> bool:
        """Whether no request is made now."""
        return self.clock_s() < self._after_s

    def metadata(self, namespace: str, reference: Mapping[str, Any]) -> Metadata | None:
        """Labels and owner references of an owner; None if it is absent, or if the API does not answer."""
        kind, name, version = (str(reference.get(key, "")) for key in ("kind", "name", "apiVersion"))
        key = (namespace, kind, name)
        if key in self._owners:
            return self._owners[key]
        if self.is_paused:
            self.is_unanswered = True
            return None
        group = f"/apis/{version}" if "/" in version else f"/api/{version}"
        try:
            whole = self.api.get(f"{group}/namespaces/{quote(namespace)}/{kind.lower()}s/{quote(name)}")
            found = {part: (whole.get("metadata") or {}).get(part) for part in ("labels", "ownerReferences")}
        except Absent:
            found = None
        except (OSError, ValueError):
            self._after_s, self.is_unanswered = self.clock_s() + _PAUSE_S, True
            return None
        if len(self._owners) >= _MAX_OWNERS:
            self._owners.clear()
        self._owners[key] = found
        return found
