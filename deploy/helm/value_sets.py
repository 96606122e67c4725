"""Sets of values that the tests render: each switch of the chart in both positions."""

from typing import Any

Values = dict[str, Any]

SETS: dict[str, Values] = {
    "defaults": {},
    "agents only": {"hub": {"enabled": False}},
    "hub only": {"agent": {"enabled": False}},
    "agents of a hub elsewhere": {
        "hub": {"enabled": False, "address": "hub.example:4317", "tlsSecret": "tls", "tokenSecret": "tokens"}
    },
    "secrets by name": {"hub": {"tlsSecret": "own-tls", "tokenSecret": "own-tokens"}},
    "every node": {"agent": {"nodeSelector": {}, "tolerations": [{"operator": "Exists"}]}},
    "old kernels": {"agent": {"addSysAdmin": True}},
    "Kubernetes 1.29": {"kubeVersion": "1.29.4"},
    "AppArmor of the runtime": {"agent": {"appArmor": "RuntimeDefault"}},
    "no AppArmor": {"agent": {"appArmor": ""}},
    "own seccomp profile": {"agent": {"seccompProfile": "stallscope-agent.json"}},
    "SELinux": {"agent": {"seLinuxType": "spc_t"}},
    "NVIDIA runtime": {"agent": {"runtimeClassName": "nvidia"}},
    "new priority class": {"agent": {"priorityClass": {"create": True, "value": 5000}}},
    "existing priority class": {"agent": {"priorityClass": {"name": "system-node-critical"}}},
    "metadata": {"agent": {"metadata": {"enabled": True}}},
    "metadata and Slurm": {
        "agent": {"metadata": {"enabled": True}, "settings": {"owners": "kubernetes, slurm"}}
    },
    "monitors": {
        "monitoring": {
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "serviceMonitor": {"enabled": True},
        }
    },
    "no metrics, but OTLP": {"agent": {"prometheus": {"enabled": False}, "otlp": "collector:4317"}},
    "no volume": {"hub": {"persistence": {"enabled": False}}},
    "existing claim": {"hub": {"persistence": {"existingClaim": "claim"}}},
    "open network": {"hub": {"networkPolicy": {"enabled": False}, "service": {"type": "LoadBalancer"}}},
    "peers outside": {
        "hub": {
            "networkPolicy": {
                "apiFrom": [{"namespaceSelector": {"matchLabels": {"team": "ml"}}}],
                "ingestFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            }
        }
    },
    "three hubs": {
        "hub": {
            "replicas": 3,
            "shared": {
                "postgres": "postgresql://stallscope@db.example:5432/stallscope",
                "postgresSecret": "hub-postgres",
                "bucket": "s3://stallscope/prod?region=eu-central-1",
                "bucketSecret": "hub-bucket",
            },
            "networkPolicy": {"egressTo": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]},
        }
    },
    "one hub that shares its data by a role": {
        "hub": {
            "shared": {
                "postgres": "postgresql://stallscope@db.example/stallscope",
                "bucket": "s3://stallscope",
                "serviceAccountName": "hub-bucket",
                "publish": {"enabled": True, "schedule": "*/10 * * * *"},
            },
            "podDisruptionBudget": {"enabled": False},
            "extraEnv": [{"name": "E", "value": "F"}],
        }
    },
    "everything else": {
        "cluster": "prod",
        "fullnameOverride": "stalls",
        "commonLabels": {"team": "infra"},
        "image": {
            "agent": {"repository": "mirror.example/agent", "digest": f"sha256:{'0' * 64}"},
            "hub": {"repository": "mirror.example/hub", "tag": "1.2.3"},
            "pullPolicy": "Always",
            "pullSecrets": ["mirror"],
        },
        "agent": {
            "settings": {"probe_budget_percent": 0, "min_late_ms": 5},
            "podLabels": {"a": "b"},
            "podAnnotations": {"c": "d"},
            "extraEnv": [{"name": "E", "value": "F"}],
            "affinity": {"nodeAffinity": {}},
            "updateStrategy": {"type": "OnDelete"},
        },
        "hub": {
            "settings": {"usd_per_gpu_hour": 2.5},
            "persistence": {"size": "1Ti", "storageClass": "fast"},
            "extraNames": ["hub.example"],
            "priorityClassName": "high",
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "x", "operator": "Exists"}],
            "extraEnv": [{"name": "E", "value": "F"}],
            "service": {"annotations": {"a": "b"}},
        },
    },
}

PLAIN: dict[str, Values] = {
    "agent.yaml": {"hub": {"enabled": False}},
    "agent-and-hub.yaml": {
        "hub": {"tlsSecret": "stallscope-hub-tls", "tokenSecret": "stallscope-hub-tokens"}
    },
}
"""The values of the plain manifests in deploy/kubernetes."""
