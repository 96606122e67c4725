"""A gRPC server for tests: python grpc_server.py

It prints its process number, and its port once it listens. Methods of the service `tests.Engine`: Whole (one message),
Tokens (N_TOKENS messages, GAP_S apart), Chat (N_TOKENS messages for each message of the client), Large (messages of
LARGE_BYTES), Never (no message), Refused (an error), Begun (header fields, and then the end), Empty (only the end),
Broken (a message, and then an error), BegunRefused (header fields, and then an error).
Whole is also the method ModelInfer of Triton's service, and Empty its ModelStreamInfer.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

N_TOKENS = 5
GAP_S = 0.03
LARGE_BYTES = 1 << 18


def whole(_request: bytes, _context: grpc.ServicerContext) -> bytes:
    time.sleep(GAP_S)
    return b"whole"


def tokens(_request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
    for i in range(N_TOKENS):
        time.sleep(GAP_S)
        yield b"token %d" % i


def chat(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    for request in requests:
        yield from tokens(request, context)


def large(_request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
    for _ in range(N_TOKENS):
        yield bytes(LARGE_BYTES)


def never(_request: bytes, context: grpc.ServicerContext) -> bytes:
    while context.is_active():
        time.sleep(GAP_S)
    return b""


def refused(_request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such model")
    return b""


def begun(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    context.send_initial_metadata(())
    return iter(())


def broken(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    yield b"token"
    context.abort(grpc.StatusCode.INTERNAL, "out of memory")


def begun_refused(_request: bytes, context: grpc.ServicerContext) -> bytes:
    context.send_initial_metadata(())
    context.abort(grpc.StatusCode.UNAVAILABLE, "no such model")
    return b""


def empty(_requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    return iter(())


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(32))
    methods = {
        "Whole": grpc.unary_unary_rpc_method_handler(whole),
        "Tokens": grpc.unary_stream_rpc_method_handler(tokens),
        "Chat": grpc.stream_stream_rpc_method_handler(chat),
        "Large": grpc.unary_stream_rpc_method_handler(large),
        "Never": grpc.unary_unary_rpc_method_handler(never),
        "Refused": grpc.unary_unary_rpc_method_handler(refused),
        "Begun": grpc.unary_stream_rpc_method_handler(begun),
        "Empty": grpc.stream_stream_rpc_method_handler(empty),
        "Broken": grpc.unary_stream_rpc_method_handler(broken),
        "BegunRefused": grpc.unary_unary_rpc_method_handler(begun_refused),
    }
    triton = {"ModelInfer": methods["Whole"], "ModelStreamInfer": methods["Empty"]}
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("tests.Engine", methods),
            grpc.method_handlers_generic_handler("inference.GRPCInferenceService", triton),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(os.getpid(), flush=True)
    print(port, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
