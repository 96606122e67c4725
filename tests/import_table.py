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
    "query": ["events", "importers", "store"],
    "check": ["capture", "events", "settings", "store"],
    "exporters": ["diagnose", "events"],
    "synth": ["events"],
    "live": ["diagnose", "events", "store"],
    "receive": ["events", "store", "store.hub"],
    "continuous": ["diagnose", "events", "store", "store.hub"],
    "serve": ["diagnose", "ending", "events", "query", "rates", "settings", "store", "store.hub"],
    "stress": ["events", "exporters"],
    "agent": ["capture", "diagnose", "ending", "events", "exporters", "rates", "serve", "settings", "store"],
    "hub": [
        "diagnose",
        "ending",
        "events",
        "exporters",
        "importers",
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
