"""The retry time in a refusal."""

from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from stallscope.exporters.otlp_retry import retry_after_s


def details(seconds: int) -> bytes:
    status = status_pb2.Status(code=14)
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds)))
    return status.SerializeToString()


def test_the_time_that_was_asked_for():
    metadata = (("other", "x"), ("grpc-status-details-bin", details(7)))
    assert retry_after_s(metadata) == 7
    assert retry_after_s((("grpc-status-details-bin", details(-7)),)) == 0


def test_missing_or_malformed_retry_details_have_no_retry_time():
    assert retry_after_s(None) is None
    assert retry_after_s((("grpc-status-details-bin", b"\xff\xff\xff"),)) is None
