"""A small inference engine on one GPU: python serving_engine.py eager|graph PORT

A decoder with random weights and continuous batching: the engine thread works on new prompts, then makes a token for
each running request in one step, launched operation by operation or as a CUDA graph. The front end has a thread for
each connection. A prompt with the word "tokenizer" or "writer" has the fault of this name. It prints "ready" when it
listens.
"""

import http.server
import json
import queue
import sys
import threading
import time

N_SLOTS, N_CACHED, N_LAYERS, WIDTH, N_HEADS, N_WORDS = 16, 1024, 8, 1024, 16, 1024
DONE = b"data: [DONE]\n\n"
LONGEST = 120_000


class Decoder:
    """Random weights, the cache of keys and values of all slots, and a step of all slots."""

    def __init__(self, *, as_graph: bool):
        import torch

        self.torch = torch
        torch.manual_seed(0)
        torch.set_grad_enabled(False)
        options = {"device": "cuda", "dtype": torch.bfloat16}

        def weights(*shape: int):
            return torch.randn(*shape, **options) * 0.02

        self.words = weights(N_WORDS, WIDTH)
        shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        self.layers = [tuple(weights(*shape) for shape in shapes) for _ in range(N_LAYERS)]
        self.keys = torch.zeros(N_LAYERS, N_SLOTS, N_CACHED, WIDTH, **options)
        self.values = torch.zeros_like(self.keys)
        self.tokens = torch.zeros(N_SLOTS, dtype=torch.int64, device="cuda")
        self.at = torch.zeros(N_SLOTS, dtype=torch.int64, device="cuda")
        self.slots = torch.arange(N_SLOTS, device="cuda")
        self.times = torch.arange(N_CACHED, device="cuda")
        self.graph = None
        self.warm_up(as_graph=as_graph)

    def warm_up(self, *, as_graph: bool) -> None:
        torch = self.torch
        for n in (8, 64, LONGEST):
            self.prefill(0, n)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        if as_graph:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()

    def norm(self, x):
        return self.torch.nn.functional.rms_norm(x, (WIDTH,))

    def step(self) -> None:
        """The next token of each slot."""
        torch = self.torch
        x = self.words[self.tokens]
        is_later = self.times[None, None] > self.at[:, None, None]
        heads = (N_HEADS, WIDTH // N_HEADS)
        for i, (into, out, wide, narrow) in enumerate(self.layers):
            query, key, value = (self.norm(x) @ into).chunk(3, -1)
            self.keys[i].index_put_((self.slots, self.at), key)
            self.values[i].index_put_((self.slots, self.at), value)
            cached = self.keys[i].view(N_SLOTS, N_CACHED, *heads)
            scores = torch.einsum("bhd,bthd->bht", query.view(N_SLOTS, *heads), cached) / heads[1] ** 0.5
            shares = scores.masked_fill(is_later, float("-inf")).softmax(-1)
            read = torch.einsum("bht,bthd->bhd", shares, self.values[i].view(N_SLOTS, N_CACHED, *heads))
            x = x + read.reshape(N_SLOTS, WIDTH) @ out
            x = x + torch.nn.functional.gelu(self.norm(x) @ wide) @ narrow
        self.tokens.copy_((self.norm(x) @ self.words.T).argmax(-1))
        self.at.add_(1).clamp_(max=N_CACHED - 1)

    def prefill(self, slot: int, n: int) -> None:
        """Work on a prompt of n tokens; only its last part goes into the cache."""
        functional = self.torch.nn.functional
        x = self.words[self.torch.arange(n, device="cuda") % N_WORDS]
        for into, out, wide, narrow in self.layers:
            query, key, value = (
                part.view(1, n, N_HEADS, -1).transpose(1, 2) for part in (self.norm(x) @ into).chunk(3, -1)
            )
            read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + read.transpose(1, 2).reshape(n, WIDTH) @ out
            x = x + functional.gelu(self.norm(x) @ wide) @ narrow
        self.at[slot] = min(n, N_CACHED // 2)
        self.tokens[slot] = 1

    def next_tokens(self) -> list[int]:
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()
        return self.tokens.tolist()


class Engine:
    """Requests wait in a queue for a free slot; each gets its tokens through its own queue."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.waiting: queue.Queue = queue.Queue()
        self.running: dict[int, list] = {}

    def run(self) -> None:
        while True:
            while len(self.running) < N_SLOTS and (not self.running or not self.waiting.empty()):
                n_prompt, n_tokens, out = self.waiting.get()
                slot = next(i for i in range(N_SLOTS) if i not in self.running)
                self.decoder.prefill(slot, n_prompt)
                self.running[slot] = [n_tokens, out]
            self.hand_out(self.decoder.next_tokens())

    def hand_out(self, tokens: list[int]) -> None:
        for slot, work in list(self.running.items()):
            work[0] -= 1
            work[1].put(tokens[slot])
            if work[0] == 0:
                work[1].put(None)
                del self.running[slot]


def slow_merge(text: str) -> int:
    """Pairs of a tokenizer in pure Python."""
    total, end_s = 0, time.process_time() + 0.4
    while time.process_time() < end_s:
        for i in range(2000):
            total += ord(text[i % len(text)])
    return total


def flush_slowly() -> None:
    time.sleep(0.4)


def handler(engine: Engine):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["prompt"]
            if "tokenizer" in prompt:
                slow_merge(prompt)
            out: queue.Queue = queue.Queue()
            engine.waiting.put((max(min(len(prompt), LONGEST), 1), int(body["n_predict"]), out))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            i = 0
            while (token := out.get()) is not None:
                i += 1
                if i == 5 and "writer" in prompt:
                    flush_slowly()
                self.chunk(b'data: {"token": %d}\n\n' % token)
            self.chunk(DONE)
            self.wfile.write(b"0\r\n\r\n")

        def chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def log_message(self, *_words: object) -> None:
            pass

    return Handler


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def main() -> None:
    engine = Engine(Decoder(as_graph=sys.argv[1] == "graph"))
    threading.Thread(target=engine.run, daemon=True).start()
    server = Server(("127.0.0.1", int(sys.argv[2])), handler(engine))
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
