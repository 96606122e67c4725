"""Which package may import which. The table is the architecture; a new package begins with a row here.

Every package may import `errors`. `commands` may import every package; `cli` imports only `commands`.
"""

MAY_IMPORT = {
    "settings": [],
    "rates": [],
    "ending": [],
    "annotate": [],
    "events": [],
    "capture": ["events", "settings"],
    "importers": ["events"],
    "store": ["events"],
    "store.hub": ["events", "store"],
    "diagnose": ["events"],
    "alerts": ["events", "store.hub"],
    "query": ["events", "importers", "store"],
    "check": ["capture", "events", "settings", "store"],
    "exporters": ["diagnose", "events"],
    "synth": ["events"],
    "live": ["alerts", "diagnose", "events", "store"],
    "receive": ["events", "store", "store.hub"],
    "continuous": ["diagnose", "events", "store", "store.hub"],
    "serve": ["alerts", "diagnose", "ending", "events", "query", "rates", "settings", "store", "store.hub"],
    "page": ["diagnose", "events", "exporters", "serve", "store", "store.hub"],
    "stress": ["events", "exporters"],
    "agent": [
        "alerts",
        "capture",
        "diagnose",
        "ending",
        "events",
        "exporters",
        "rates",
        "serve",
        "settings",
        "store",
    ],
    "hub": [
        "alerts",
        "diagnose",
        "ending",
        "events",
        "exporters",
        "importers",
        "page",
        "rates",
        "receive",
        "serve",
        "settings",
        "continuous",
        "store",
        "store.hub",
    ],
    "demo": ["agent", "capture", "diagnose", "events", "importers", "serve", "settings", "store", "synth"],
    "assistant": ["check", "demo", "diagnose", "events", "query", "rates", "serve", "settings", "store"],
}

PUBLIC = {
    "diagnose": ["diagnose", "diagnose.arrays", "diagnose.processes", "diagnose.timeline", "diagnose.views"],
}
"""The modules of a part that other parts import, by the names in `__all__`; its other files are inner files."""
