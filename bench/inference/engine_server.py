"""A small inference engine with one fault: python engine_server.py KIND FAULT PORT FOLDER

KIND: uvicorn (one process, asyncio), threads (one process, a thread for each connection), split (an API server and an
engine core in two processes, over ZMQ as in vLLM), llama.cpp or triton (the model is code of this process). The prompt
selects the work: a long prompt takes longer, and the word "rare" triggers the faults of a request. FAULT_S in the
environment is the length of a delay.
"""

import http.server
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fault_code import (
    burn,
    deadlock,
    flush_slowly,
    load_adapter,
    log_line,
    look_up,
    map_weights,
    match_badly,
    read_shared,
    slow_merge,
    sum_squares,
)

KIND, FAULT, PORT, FOLDER = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
GAP_S = 0.01
FAULT_S = float(os.environ.get("FAULT_S", "0.4"))
TOKEN = b'data: {"token": 1}\n\n'
DONE = b"data: [DONE]\n\n"
SLOTS = threading.Semaphore(2 if FAULT == "kv_space" else 4 if FAULT == "overload" else 64)
OF_ENGINE = {
    "adapter": load_adapter,
    "weights": map_weights,
    "remote": look_up,
    "file_lock": read_shared,
    "held_file": read_shared,
}
BATCH = threading.Lock()
COLD = threading.Lock()


def tokenize(text: str) -> int:
    return slow_merge(text, FAULT_S) if FAULT == "tokenizer" and "rare" in text else len(text)


def start_slowly() -> None:
    """Loads a model before the server listens, and warms up in the first request."""
    burn(2.0)
    time.sleep(2.0)


def warm_up() -> None:
    if COLD.acquire(blocking=False):
        burn(4.0)


def spin_with_lock() -> None:
    """Holds the interpreter lock for half a second in each second."""
    while True:
        time.sleep(1.0)
        sum_squares(int(15_000_000 * FAULT_S))


def before_work(prompt: str) -> None:
    """The part of the front end before the engine."""
    tokenize(prompt)
    if FAULT == "regex" and "rare" in prompt:
        match_badly(FAULT_S)
    if FAULT == "log_pipe":
        log_line()


def engine_fault(prompt: str) -> None:
    if FAULT == "slow_start":
        warm_up()
    if "rare" in prompt:
        if FAULT in OF_ENGINE:
            OF_ENGINE[FAULT](FOLDER)
        if FAULT == "deadlock":
            deadlock()


def writer_fault(i: int, prompt: str) -> None:
    if FAULT == "writer_sleep" and "rare" in prompt and i == 5:
        flush_slowly(FAULT_S)


def n_tokens(body: dict) -> int:
    return int(body.get("n_predict", 20))


def token_of(body: dict) -> bytes:
    return b'data: {"token": "%s"}\n\n' % (b"x" * int(body.get("size", 1)))


def prefill_s(prompt: str) -> float:
    return 0.002 + len(prompt) * 2e-5


# ---- one process, asyncio ----


def serve_uvicorn() -> None:
    import asyncio

    slots = asyncio.Semaphore(2 if FAULT == "kv_space" else 4 if FAULT == "overload" else 64)

    async def tokens(body: dict):
        prompt = body["prompt"]
        before_work(prompt)
        async with slots:
            engine_fault(prompt)
            burn(prefill_s(prompt))
            for i in range(n_tokens(body)):
                await asyncio.sleep(GAP_S)
                burn(0.001)
                writer_fault(i, prompt)
                yield token_of(body)
        yield DONE

    serve_app(tokens)


def serve_app(tokens) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def complete(request) -> Response:
        body = await request.json()
        if body.get("stream", True):
            return StreamingResponse(tokens(body), media_type="text/event-stream")
        return Response(b"".join([data async for data in tokens(body)]))

    async def health(_request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    routes = [Route("/completion", complete, methods=["POST"]), Route("/health", health)]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=PORT, log_level="warning")


# ---- one process, threads ----


def token_stream(body: dict) -> Iterator[bytes]:
    prompt = body["prompt"]
    before_work(prompt)
    with SLOTS:
        with BATCH:
            engine_fault(prompt)
            burn(prefill_s(prompt))
        for i in range(n_tokens(body)):
            time.sleep(GAP_S)
            with BATCH:
                burn(0.001)
            writer_fault(i, prompt)
            yield token_of(body)
    yield DONE


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        if not body.get("stream", True):
            whole = b"".join(token_stream(body))
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole)
            return
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in token_stream(body):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_words: object) -> None:
        pass


class ThreadingServer(http.server.ThreadingHTTPServer):
    request_queue_size = 128


def serve_threads() -> None:
    ThreadingServer(("127.0.0.1", PORT), Handler).serve_forever()


# ---- two processes over ZMQ ----


def core(to_core: str, from_core: str) -> None:
    """The engine core: a loop of steps, each makes one token for each running request."""
    import zmq

    context = zmq.Context()
    requests, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    requests.connect(to_core)
    answers.connect(from_core)
    if FAULT == "spin":
        threading.Thread(target=spin_with_lock, daemon=True).start()
    waiting: list[tuple[bytes, dict]] = []
    running: dict[bytes, int] = {}
    most = 2 if FAULT == "kv_space" else 4 if FAULT == "overload" else 64
    while True:
        while requests.poll(0 if waiting or running else 1000):
            key, text = requests.recv_multipart()
            waiting.append((key, json.loads(text)))
        while waiting and len(running) < most:
            key, body = waiting.pop(0)
            engine_fault(body["prompt"])
            burn(prefill_s(body["prompt"]))
            running[key] = n_tokens(body)
        if running:
            step(running, answers)


def step(running: dict[bytes, int], answers) -> None:
    time.sleep(GAP_S)
    burn(0.001)
    for key in list(running):
        running[key] -= 1
        answers.send_multipart([key, b"1" if running[key] else b"0"])
        if not running[key]:
            del running[key]


def serve_split() -> None:
    import asyncio
    import multiprocessing

    import zmq
    import zmq.asyncio

    to_core, from_core = f"ipc://{FOLDER}/to_core", f"ipc://{FOLDER}/from_core"
    multiprocessing.get_context("spawn").Process(target=core, args=(to_core, from_core), daemon=True).start()
    context = zmq.asyncio.Context()
    requests, answers = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    requests.bind(to_core)
    answers.bind(from_core)
    queues: dict[bytes, asyncio.Queue] = {}
    tasks: list[object] = []

    async def deliver() -> None:
        while True:
            key, more = await answers.recv_multipart()
            if key in queues:
                queues[key].put_nowait(more)

    async def tokens(body: dict):
        if not tasks:
            tasks.append(asyncio.create_task(deliver()))
        prompt = body["prompt"]
        before_work(prompt)
        key = os.urandom(8)
        queues[key] = asyncio.Queue()
        await requests.send_multipart([key, json.dumps(body).encode()])
        i, more = 0, b"1"
        while more == b"1":
            more = await queues[key].get()
            writer_fault(i, prompt)
            i += 1
            yield token_of(body)
        del queues[key]
        yield DONE

    serve_app(tokens)


# ---- llama.cpp ----


def serve_llama() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "targets"))
    import xllamacpp
    from streaming_server import write_model

    model = FOLDER / "tiny.gguf"
    write_model(model)
    options = xllamacpp.CommonParams()
    options.model.path = str(model)
    options.n_parallel = 2 if FAULT in ("kv_space", "overload") else 8
    options.n_ctx, options.cpuparams.n_threads = 65536, 1
    options.endpoint_metrics = True
    options.hostnames, options.port = ["127.0.0.1"], PORT
    server = xllamacpp.Server(options)
    print(server.listening_address, flush=True)
    if FAULT == "spin":
        spin_with_lock()
    time.sleep(3600)


# ---- Triton ----


def serve_triton() -> None:
    """The real server, by PyTriton, with as many instances of the model as requests that run at a time."""
    import asyncio

    import numpy as np
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    def answer(requests) -> Iterator[list[dict[str, object]]]:
        values = {name: requests[0][name].ravel()[0] for name in ("prompt", "n_predict", "size")}
        body = values | {"prompt": values["prompt"].decode()}
        for data in token_stream(body):
            yield [{"token": np.array([data.strip()])}]

    def limited(n: int):
        """An instance that works on n requests at a time. Its requests share a thread, so they may not block."""
        slots: list[asyncio.Semaphore] = []

        async def answer(requests):
            values = {name: requests[0][name].ravel()[0] for name in ("prompt", "n_predict", "size")}
            slots.extend([] if slots else [asyncio.Semaphore(n)])
            async with slots[0]:
                burn(prefill_s(values["prompt"].decode()))
                for _ in range(values["n_predict"]):
                    await asyncio.sleep(GAP_S)
                    burn(0.001)
                    yield [{"token": np.array([token_of(values).strip()])}]

        return answer

    instances = {"kv_space": [limited(1), limited(1)], "overload": [limited(2), limited(2)]}
    ports = {name: free_port() for name in ("grpc_port", "metrics_port")}
    addresses = dict.fromkeys(("http_address", "grpc_address", "metrics_address"), "127.0.0.1")
    config = TritonConfig(http_port=PORT, exit_timeout_secs=2, **ports, **addresses)
    inputs = [("prompt", bytes), ("n_predict", np.int32), ("size", np.int32)]
    with Triton(config=config) as server:
        server.bind(
            model_name="engine",
            infer_func=instances.get(FAULT, [answer] * 4),
            inputs=[Tensor(name=name, dtype=kind, shape=(1,)) for name, kind in inputs],
            outputs=[Tensor(name="token", dtype=bytes, shape=(1,))],
            config=ModelConfig(batching=False, decoupled=True),
        )
        server.serve()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    if FAULT == "slow_start":
        start_slowly()
    if FAULT == "spin" and KIND in ("uvicorn", "threads", "triton"):
        threading.Thread(target=spin_with_lock, daemon=True).start()
    kinds = {
        "uvicorn": serve_uvicorn,
        "threads": serve_threads,
        "split": serve_split,
        "llama.cpp": serve_llama,
        "triton": serve_triton,
    }
    kinds[KIND]()


if __name__ == "__main__":
    main()
