"""A process with the store and the alerts of a hub, for a test that kills it: killed_hub.py FOLDER URL open|closed."""

import sys
import time
from pathlib import Path

from tests.alerts.test_hub_alerts import commit

from stallscope.alerts import service
from stallscope.alerts.config import validated
from stallscope.alerts.state import AlertState, state_path
from stallscope.store.hub.store import HubStore


def main(folder: str, url: str, state: str) -> None:
    """Store an incident, send its alerts, and wait for the end."""
    config = validated(
        {
            "resolve_after": "0s",
            "receivers": {"hook": {"type": "webhook", "url": url}},
            "routes": [{"receivers": "hook"}],
        },
        "alerts.yaml",
    )
    store = HubStore.open(Path(folder))
    service.of_hub(store, AlertState(state_path(store.folder)), config)
    commit(store, is_open=state == "open")
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
