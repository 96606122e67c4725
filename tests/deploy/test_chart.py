"""The Helm chart: Helm's engine renders it, and the objects are valid in each supported version of Kubernetes."""

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stallscope.capture.owners.pod_resources import SOCKET
from stallscope.capture.probes.privileges import ALWAYS_NEEDED
from stallscope.exporters.hub_owners import is_permitted
from stallscope.settings import effective

helm_python = pytest.importorskip("helm_python", reason="the package helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
utils = pytest.importorskip("kubernetes_validate.utils")

VERSIONS = [
    pytest.param(f"1.{minor}", marks=() if minor in (30, 37) else pytest.mark.prove)
    for minor in range(29, 38)
]
OLDEST = "1.29"
FOREIGN = {"PodMonitor", "ServiceMonitor"}  # of the Prometheus operator, without a schema in Kubernetes
OLD_FIELD = "appArmorProfile"  # from 1.30 on


@pytest.fixture(scope="module")
def render(repository: Path):
    """The module that renders the chart, with the folder of its value sets."""
    sys.path.insert(0, str(repository / "deploy" / "helm"))
    try:
        import render
        import value_sets

        yield render, value_sets
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def objects(render) -> dict[str, list[dict[str, Any]]]:
    """The objects of each set of values."""
    module, values = render
    return {name: parsed(module.manifests(each)) for name, each in values.SETS.items()}


def parsed(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of YAML documents, by the parser in C, which is several times as fast."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def one(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (result,) = [each for each in objects if each["kind"] == kind]
    return result


def test_helm_finds_no_fault_in_any_set_of_values(render):
    module, values = render
    assert len(values.SETS) >= 20
    for name, each in values.SETS.items():
        report = helm_python.lint(str(module.CHART), each, strict=True)
        assert report["errors"] == [], name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_this_version(objects, render, version, monkeypatch):
    # Otherwise each object reads all definitions again.
    monkeypatch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
    module, values = render
    if version == OLDEST:  # the chart chooses a field by the version
        objects = {
            name: parsed(module.manifests(each | {"kubeVersion": f"{OLDEST}.0"}))
            for name, each in values.SETS.items()
        }
    checked: dict[str, None] = {}
    for each in objects.values():
        for obj in each:
            text = json.dumps(obj, sort_keys=True)
            if obj["kind"] in FOREIGN or text in checked:
                continue
            checked[text] = None
            kubernetes_validate.validate(obj, version, strict=True)
    assert len(checked) > 30


def test_version_1_29_gets_an_annotation_instead_of_the_field(objects):
    (old,) = [each for each in objects["Kubernetes 1.29"] if each["kind"] == "DaemonSet"]
    assert OLD_FIELD not in json.dumps(old)
    annotations = old["spec"]["template"]["metadata"]["annotations"]
    assert annotations["container.apparmor.security.beta.kubernetes.io/agent"] == "unconfined"


def test_the_agent_has_exactly_the_five_capabilities(objects):
    for name, each in objects.items():
        for obj in (obj for obj in each if obj["kind"] == "DaemonSet"):
            (container,) = obj["spec"]["template"]["spec"]["containers"]
            context = container["securityContext"]
            more = ["SYS_ADMIN"] if name == "old kernels" else []
            assert context["capabilities"]["drop"] == ["ALL"]
            kept = {each.name.removeprefix("CAP_") for each in ALWAYS_NEEDED}
            assert set(context["capabilities"]["add"]) == kept | set(more)
            assert not context["privileged"] and not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
            own = name == "own seccomp profile"
            assert context["seccompProfile"]["type"] == ("Localhost" if own else "RuntimeDefault")


def test_the_hub_is_not_root_and_has_no_capability(objects):
    spec = one(objects["defaults"], "StatefulSet")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_accounts_exist_only_for_metadata(objects):
    kinds = {name: {obj["kind"] for obj in each} for name, each in objects.items()}
    for name, each in kinds.items():
        is_wanted = name.startswith("metadata")
        of_accounts = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
        assert each & of_accounts == (of_accounts if is_wanted else set())
        for obj in (obj for obj in objects[name] if obj["kind"] == "DaemonSet"):
            spec = obj["spec"]["template"]["spec"]
            assert ("serviceAccountName" in spec) == is_wanted
            assert (spec.get("automountServiceAccountToken") is False) == (not is_wanted)


def test_metadata_are_read_only_and_turn_the_source_of_owners_on(objects):
    role, binding = (one(objects["metadata"], kind) for kind in ("ClusterRole", "ClusterRoleBinding"))
    verbs = {
        resource: rule["verbs"]
        for rule in role["rules"]
        for resource in ([*rule["apiGroups"]] if rule["resources"] == ["*"] else rule["resources"])
    }
    assert verbs.pop("pods") == ["get", "list", "watch"]
    assert verbs.keys() >= {"jobs", "replicasets", "statefulsets", "ray.io", "kubeflow.org"}
    assert all(each == ["get"] for each in verbs.values())
    account = one(objects["metadata"], "ServiceAccount")["metadata"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    spec = one(objects["metadata"], "DaemonSet")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == account["name"]
    mounts = {mount["name"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    assert Path(mounts["pod-resources"]["mountPath"]) == SOCKET.parent
    assert mounts["pod-resources"]["readOnly"]


@pytest.mark.parametrize(
    ("name", "owners"),
    [("metadata", "kubernetes"), ("metadata and Slurm", "kubernetes, slurm"), ("defaults", None)],
)
def test_own_settings_of_owners_have_priority(objects, name: str, owners: str | None):
    (settings,) = (
        yaml.safe_load(obj["data"]["settings.yaml"])
        for obj in objects[name]
        if obj["kind"] == "ConfigMap" and obj["metadata"]["name"].endswith("-agent")
    )
    assert settings.get("owners") == owners


def test_the_settings_are_settings_of_the_program(objects, tmp_path):
    path = tmp_path / "settings.yaml"
    for each in objects.values():
        for obj in (obj for obj in each if obj["kind"] == "ConfigMap"):
            path.write_text(obj["data"]["settings.yaml"])
            effective({}, {}, path)


def test_the_arguments_are_options_of_the_program(objects):
    from typer.testing import CliRunner

    from stallscope import cli

    for obj in objects["defaults"]:
        if obj["kind"] not in ("DaemonSet", "StatefulSet"):
            continue
        spec = obj["spec"]["template"]["spec"]
        for container in (*spec.get("initContainers", []), *spec["containers"]):
            words = [word for word in container["args"] if not word.startswith("--")]
            options = [word.partition("=")[0] for word in container["args"] if word.startswith("--")]
            text = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "200"}).output
            assert all(re.search(rf"{option}\b", text) for option in options), (words, options)


def certificate_names(objects: list[dict[str, Any]]) -> list[str]:
    """The names in the generated certificate of the hub."""
    import base64

    from cryptography import x509

    (secret,) = [obj["data"] for obj in objects if obj["kind"] == "Secret" and "tls.crt" in obj["data"]]
    certificate = x509.load_pem_x509_certificate(base64.b64decode(secret["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return names.value.get_values_for_type(x509.DNSName)


def test_generated_secrets_are_tokens_and_a_certificate_for_the_service(objects):
    import base64

    from stallscope.serve.tokens import _TOKEN

    secrets = {
        each["metadata"]["name"]: each["data"] for each in objects["defaults"] if each["kind"] == "Secret"
    }
    for value in secrets["stallscope-hub-tokens"].values():
        assert _TOKEN.fullmatch(base64.b64decode(value).decode())
    address = yaml.safe_load(
        one(
            [
                each
                for each in objects["defaults"]
                if each["metadata"]["name"] == "stallscope-agent" and each["kind"] == "ConfigMap"
            ],
            "ConfigMap",
        )["data"]["settings.yaml"]
    )["hub"]
    assert address.partition(":")[0] in certificate_names(objects["defaults"])


@pytest.mark.parametrize(
    "values",
    [
        {"agent": {"enabeld": False}},
        {"agent": {"maxDb": "lots"}},
        {"agent": {"maxAge": "old"}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"hub": {"address": "https://hub"}},
        {"agent": {"appArmor": "off"}},
        {"hub": {"replicas": 0}},
        {"hub": {"replicas": 2}},
        {"hub": {"shared": {"bucket": "s3://b"}}},
        {"hub": {"shared": {"postgres": "postgresql://u@h/d"}}},
        {"hub": {"shared": {"postgres": "postgresql://u:password@h/d", "bucket": "s3://b"}}},
        {"hub": {"shared": {"password": "p"}}},
        {"hub": {"shared": {"publish": {"enabled": True}}}},
        {"hub": {"shared": {"publish": {"schedule": "often"}}}},
        {
            "hub": {
                "replicas": 2,
                "shared": {"postgres": "postgresql://u@h/d", "bucket": "s3://b"},
                "persistence": {"existingClaim": "c"},
            }
        },
    ],
)
def test_a_wrong_value_is_refused(render, values):
    with pytest.raises(helm_python.HelmError):
        render[0].rendered(values)


def test_notes_show_commands_that_exist(render):
    notes = render[0].rendered({})["stallscope/templates/NOTES.txt"]
    for words in ("exec daemonset/stallscope-agent -- stallscope check", "stallscope ask verdicts"):
        assert words in notes


def test_plain_manifests_are_current(render):
    module, values = render
    for name in values.PLAIN:
        assert (module.MANIFESTS / name).read_text() == module.plain(name), "run: make manifests"


def test_several_hubs_share_their_data_by_secrets_and_have_names_of_their_own(objects, render, tmp_path):
    each = objects["three hubs"]
    hub = one(each, "StatefulSet")
    assert hub["spec"]["replicas"] == 3 and hub["spec"]["podManagementPolicy"] == "Parallel"
    (peers,) = [obj for obj in each if obj["metadata"]["name"] == hub["spec"]["serviceName"]]
    assert peers["kind"] == "Service" and peers["spec"]["clusterIP"] == "None"
    spec = hub["spec"]["template"]["spec"]
    name = f"{peers['metadata']['name']}.{peers['metadata']['namespace']}.svc"
    for container in (*spec["initContainers"], *spec["containers"]):
        env = {entry["name"]: entry for entry in container["env"]}
        assert env["PGPASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "hub-postgres", "key": "password"}
        assert env["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "hub-bucket"
        given = {n: e["value"] for n, e in env.items() if n.startswith("STALLSCOPE_")}
        chosen = effective({}, given, None).settings
        assert chosen.hub_bucket == "s3://stallscope/prod?region=eu-central-1"
        assert (chosen.hub_peer_host, chosen.hub_direct) == (
            f"$(POD_NAME).{name}",
            f"$(POD_NAME).{name}:4317",
        )
    (agent,) = [
        yaml.safe_load(obj["data"]["settings.yaml"])
        for obj in each
        if obj["kind"] == "ConfigMap" and obj["metadata"]["name"].endswith("-agent")
    ]
    assert is_permitted(f"stallscope-hub-2.{name}:4317", agent["hub_hosts"].split(","))
    assert f"*.{name}" in certificate_names(each)
    assert one(each, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    notes = render[0].rendered(render[1].SETS["three hubs"])["stallscope/templates/NOTES.txt"]
    assert "3 hubs share their data" in notes and "stallscope hub status" in notes


def test_hubs_reach_each_other_and_the_stores_and_nothing_else(objects):
    policy = one(objects["three hubs"], "NetworkPolicy")["spec"]
    ports = [sorted({port["port"] for port in rule["ports"]}) for rule in policy["egress"]]
    assert ports == [[4319], [53], [443, 5432]]
    assert (
        policy["egress"][0]["to"] == policy["ingress"][-1]["from"] == [{"podSelector": policy["podSelector"]}]
    )
    assert policy["egress"][2]["to"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    assert one(objects["defaults"], "NetworkPolicy")["spec"]["egress"] == []
    alone = objects["one hub that shares its data by a role"]
    assert "PodDisruptionBudget" not in {obj["kind"] for obj in alone}
    assert one(alone, "StatefulSet")["spec"]["template"]["spec"]["serviceAccountName"] == "hub-bucket"
    assert one(objects["defaults"], "StatefulSet")["spec"]["replicas"] == 1


def test_delta_tables_are_published_by_a_job_that_reaches_only_the_stores(objects):
    each = objects["one hub that shares its data by a role"]
    job = one(each, "CronJob")["spec"]
    assert (job["schedule"], job["concurrencyPolicy"]) == ("*/10 * * * *", "Forbid")
    pod = job["jobTemplate"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["hub", "publish"] and pod["spec"]["serviceAccountName"] == "hub-bucket"
    assert container["image"].startswith("stallscope-publish:")
    given = {e["name"]: e["value"] for e in container["env"] if e["name"].startswith("STALLSCOPE_")}
    chosen = effective({}, given, None).settings
    assert chosen.hub_shared and chosen.hub_bucket == "s3://stallscope"
    (policy,) = [
        obj["spec"]
        for obj in each
        if obj["kind"] == "NetworkPolicy" and obj["metadata"]["name"].endswith("-publish")
    ]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["ingress"] == []
    assert [sorted({port["port"] for port in rule["ports"]}) for rule in policy["egress"]] == [
        [53],
        [443, 5432],
    ]
    assert "CronJob" not in {obj["kind"] for obj in objects["three hubs"]}


def test_the_golden_renders_are_current(render):
    module, _ = render
    for file, text in module.golden().items():
        assert (module.GOLDEN / file).read_text() == text, "run: make manifests, and review the difference"
