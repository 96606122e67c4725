"""Ingest at the hub: OTLP over gRPC and HTTP, and Arrow batches; decoded, checked, handed to the store."""
