"""Metadata services of clouds, simulated by a local server with the same requirements."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stallscope.capture.process.cloud import machine_metadata

AWS = {
    "instanceId": "i-0abc",
    "instanceType": "p5.48xlarge",
    "availabilityZone": "us-east-1a",
    "region": "us-east-1",
}
GCP = {
    "id": 4711,
    "machineType": "projects/1/machineTypes/a3-highgpu-8g",
    "zone": "projects/1/zones/us-central1-a",
    "name": "node-1",
}
AZURE = {
    "vmId": "11-22",
    "vmSize": "Standard_ND96",
    "location": "westeurope",
    "zone": "1",
    "name": "node\x1b-2",
}


class Service(BaseHTTPRequestHandler):
    """All three; a wrong header or method is refused."""

    def do_PUT(self) -> None:
        if self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
            self.told("secret-token")
        else:
            self.send_error(400)

    def do_GET(self) -> None:
        if self.path.startswith("/latest/") and self.headers["X-aws-ec2-metadata-token"] == "secret-token":
            self.told(json.dumps(AWS))
        elif self.path.startswith("/computeMetadata/") and self.headers["Metadata-Flavor"] == "Google":
            self.told(json.dumps(GCP))
        elif (
            self.path.startswith("/metadata/instance/compute?api-version=")
            and self.headers["Metadata"] == "true"
        ):
            self.told(json.dumps(AZURE))
        elif self.path.startswith("/elsewhere"):
            self.send_response(302)
            self.send_header("Location", "/computeMetadata/v1/instance/")
            self.end_headers()
        else:
            self.send_error(401)

    def told(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_aws_metadata_is_read_with_a_token(service: str):
    assert machine_metadata("aws", service) == {
        "cloud": "aws",
        "instance": "i-0abc",
        "type": "p5.48xlarge",
        "zone": "us-east-1a",
    }


def test_google_metadata_values_are_the_last_path_components(service: str):
    result = machine_metadata("gcp", service)
    assert result == {
        "cloud": "gcp",
        "instance": "4711",
        "type": "a3-highgpu-8g",
        "zone": "us-central1-a",
        "name": "node-1",
    }


def test_azure_metadata_values_are_stripped_of_control_characters(service: str):
    result = machine_metadata("azure", service)
    assert (result["instance"], result["zone"], result["name"]) == ("11-22", "westeurope-1", "node-2")


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_no_metadata_is_reported_without_a_metadata_service(service: str, cloud: str):
    assert machine_metadata(cloud, service + "/elsewhere") == {}
    assert machine_metadata(cloud, "http://127.0.0.1:9") == {}


def test_a_proxy_is_not_asked(service: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert machine_metadata("gcp", service)["instance"] == "4711"
