"""A server for tests that answers by the path of a request; answer() has the paths.

    python scripted_server.py ADDRESS     (a port of 127.0.0.1, or the path of a Unix socket)

It prints its process number, and the address once it listens. Each thread serves one connection.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time

N_TOKENS = 5
GAP_S = 0.03
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def tokens(connection: socket.socket, *, in_pieces: bool = False) -> None:
    connection.sendall(CHUNKED)
    for i in range(N_TOKENS):
        time.sleep(GAP_S)
        data = b'data: {"t": %d}\n\n' % i
        if in_pieces:
            for piece in (b"%x\r\n" % len(data), data, b"\r\n"):
                connection.sendall(piece)
        else:
            connection.sendall(chunk(data))
    connection.sendmsg([b"e\r\n", b"data: [DONE]\n\n", b"\r\n"])
    connection.sendall(b"0\r\n\r\n")


def answer(connection: socket.socket, path: bytes) -> bool:
    """Answer one request; False: the connection ends."""
    if path == b"/stream":
        tokens(connection)
    elif path == b"/pieces":
        tokens(connection, in_pieces=True)
    elif path == b"/split_end":
        connection.sendall(CHUNKED)
        connection.sendall(chunk(b"data: 1\n\n"))
        connection.sendall(b"0\r\n")  # as cpp-httplib does before trailers
        connection.sendall(b"\r\n")
    elif path == b"/ids":
        connection.sendall(CHUNKED)
        connection.sendall(chunk(b'data: {"id":"cmpl-7","choices":[]}\n\n'))
        connection.sendall(chunk(b'data: {"id":"other"}\n\n') + b"0\r\n\r\n")
    elif path == b"/spaced_id":
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n")
        connection.sendall(b'{ "id": "cmpl-7" }')
    elif path == b"/long_id":
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 218\r\n\r\n")
        connection.sendall(b'{"id":"%s"}' % (b"x" * 209))
    elif path == b"/sized":
        connection.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\n")
        time.sleep(GAP_S)
        connection.sendall(b"0123456789")
    elif path == b"/closing":
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        for i in range(N_TOKENS):
            time.sleep(GAP_S)
            connection.sendall(b"data: %d\n\n" % i)
        return False
    elif path == b"/full":
        connection.sendall(CHUNKED)
        connection.setblocking(False)
        data = memoryview(chunk(b"data: " + b"x" * (8 << 20) + b"\n\n") + b"0\r\n\r\n")
        while data:
            try:
                data = data[connection.send(data) :]
            except BlockingIOError:
                time.sleep(0.002)
        connection.setblocking(True)
    elif path == b"/polled":
        connection.sendall(CHUNKED)
        connection.setblocking(False)
        data = memoryview(chunk(b"data: " + b"x" * (8 << 20) + b"\n\n") + b"0\r\n\r\n")
        while data:
            select.select([], [connection], [])
            data = data[connection.send(data[:10_000]) :]
        connection.setblocking(True)
    return True


def serve(connection: socket.socket) -> None:
    data = b""
    with connection:
        while part := connection.recv(1 << 16):
            data += part
            while b"\r\n\r\n" in data:
                header, _, rest = data.partition(b"\r\n\r\n")
                n_bytes = int(header.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
                if len(rest) < n_bytes:
                    break
                data = rest[n_bytes:]
                path = header.split(b" ")[1].partition(b"?")[0]
                if path == b"/never":
                    time.sleep(3600)
                if not answer(connection, path):
                    return


def main(address: str) -> None:
    is_port = address.isdigit()
    listening = (
        socket.create_server(("127.0.0.1", int(address))) if is_port else socket.socket(socket.AF_UNIX)
    )
    if not is_port:
        listening.bind(address)
        listening.listen()
    print(listening.getsockname()[1] if is_port else address, flush=True)
    while True:
        threading.Thread(target=quietly, args=(listening.accept()[0],), daemon=True).start()


def quietly(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        serve(connection)


if __name__ == "__main__":
    print(os.getpid(), flush=True)
    main(sys.argv[1])
