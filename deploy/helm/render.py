"""Renders the chart with Helm's engine (PyPI: helm-python-sdk), and writes the plain manifests of deploy/kubernetes.

python deploy/helm/render.py    writes deploy/kubernetes/*.yaml and tests/golden/chart_*.yaml
"""

import re
from pathlib import Path
from typing import Any

from value_sets import PLAIN, SETS

CHART = Path(__file__).parent / "stallscope"
MANIFESTS = CHART.parents[1] / "kubernetes"
GOLDEN = CHART.parents[2] / "tests" / "golden"
NAMESPACE = "stallscope"

_GOLDEN_AGENTS = (
    "agents of a hub elsewhere",
    "old kernels",
    "own seccomp profile",
    "new priority class",
    "metadata and Slurm",
    "monitors",
    "everything else",
)
_GOLDEN_HUBS = (
    "monitors",
    "no volume",
    "existing claim",
    "open network",
    "peers outside",
    "three hubs",
    "one hub that shares its data by a role",
    "everything else",
)

_HEAD = """\
# Written by deploy/helm/render.py from the chart: change the chart and run `make manifests`.
#
#   kubectl create namespace stallscope
{secrets}#   kubectl apply -f {name}
"""
_SECRETS = """\
#   stallscope hub quickstart --db quickstart --name stallscope-hub.stallscope.svc
#   kubectl -n stallscope create secret generic stallscope-hub-tls --from-file=tls.crt=quickstart/tls/hub.crt \\
#     --from-file=tls.key=quickstart/tls/hub.key --from-file=ca.crt=quickstart/tls/hub.crt
#   kubectl -n stallscope create secret generic stallscope-hub-tokens --from-file=ingest=quickstart/ingest.token \\
#     --from-file=read=quickstart/read.token --from-file=admin=quickstart/read.token
"""


def rendered(values: dict[str, Any]) -> dict[str, str]:
    """The text of each template with these values. Raises HelmError."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        return chart.render(values, name="stallscope", namespace=NAMESPACE)


def manifests(values: dict[str, Any]) -> str:
    """All objects with these values, as one stream of YAML documents without empty documents."""
    texts = [text for name, text in sorted(rendered(values).items()) if name.endswith(".yaml")]
    documents = [
        part.strip("\n") for text in texts for part in re.split(r"^---\s*$", text, flags=re.MULTILINE)
    ]
    return "".join(f"---\n{document}\n" for document in documents if document.strip())


def plain(name: str) -> str:
    """The text of a plain manifest, without the labels that only Helm needs."""
    text = manifests(PLAIN[name])
    text = re.sub(r"^ *app\.kubernetes\.io/managed-by: Helm\n", "", text, flags=re.MULTILINE)
    return _HEAD.format(name=name, secrets=_SECRETS if "tlsSecret" in PLAIN[name]["hub"] else "") + text


def golden() -> dict[str, str]:
    """The files of tests/golden: the objects of the agents and of the hub with several sets of values.

    The hub's Secrets have names, because generated Secrets differ each time.
    """
    agents = [(name, _with(SETS[name], "hub", enabled=False)) for name in _GOLDEN_AGENTS]
    hubs = [
        (name, _with(_with(SETS[name], "agent", enabled=False), "hub", tlsSecret="tls", tokenSecret="tokens"))
        for name in _GOLDEN_HUBS
    ]
    return {
        file: "".join(f"# {name}\n{manifests(values)}" for name, values in sets)
        for file, sets in (("chart_agents.yaml", agents), ("chart_hubs.yaml", hubs))
    }


def _with(values: dict[str, Any], part: str, **more: Any) -> dict[str, Any]:
    return values | {part: values.get(part, {}) | more}


if __name__ == "__main__":
    MANIFESTS.mkdir(exist_ok=True)
    for name in PLAIN:
        (MANIFESTS / name).write_text(plain(name))
    for file, text in golden().items():
        (GOLDEN / file).write_text(text)
