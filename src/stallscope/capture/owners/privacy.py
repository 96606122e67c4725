"""Labels that an operator wants to keep private: dropped, or replaced by a hash that groups equal values."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from stallscope.errors import BadInput
from stallscope.events.owner import OWNER_LABELS


@dataclass(frozen=True)
class Privacy:
    """dropped, hashed: labels. key: of the hash, at most 64 bytes; machines with the same key give the same hash."""

    dropped: frozenset[str] = frozenset()
    hashed: frozenset[str] = frozenset()
    key: bytes = b""

    @staticmethod
    def of(dropped: str, hashed: str, key: str) -> "Privacy":
        """From lists separated by commas. Raises BadInput for an unknown label, and for a hash without a key."""
        lists = [
            frozenset(name.strip() for name in text.split(",") if name.strip()) for text in (dropped, hashed)
        ]
        if unknown := sorted(frozenset().union(*lists) - OWNER_LABELS.keys()):
            raise BadInput(f"unknown owner label {unknown[0]!r}: choose from {', '.join(OWNER_LABELS)}")
        if lists[1] and not key:
            raise BadInput("owner_hash needs owner_hash_key: without a key, short names can be guessed")
        return Privacy(lists[0], lists[1], hashlib.blake2b(key.encode()).digest())

    def applied(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels that may be stored and sent."""
        return {
            label: self._hash(value) if label in self.hashed else value
            for label, value in labels.items()
            if label not in self.dropped and value
        }

    def _hash(self, value: str) -> str:
        return "#" + hashlib.blake2b(value.encode(), digest_size=6, key=self.key).hexdigest()
