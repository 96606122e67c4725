"""A streaming server for benchmarks: python streaming_server.py asyncio|threads|llama.cpp PORT

It prints "ready" before it listens. The model of llama.cpp has random weights, made at the start.
"""

import http.server
import string
import sys
import tempfile
import time
from pathlib import Path

N_TOKENS, GAP_S = 24, 0.01
CONTEXT = 65536
DONE = b"data: [DONE]\n\n"


def token(i: int) -> bytes:
    return b'data: {"token": %d}\n\n' % i


def serve_asyncio(port: int) -> None:
    import asyncio

    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def tokens():
        for i in range(N_TOKENS):
            await asyncio.sleep(GAP_S)
            yield token(i)
        yield DONE

    async def complete(_request) -> StreamingResponse:
        return StreamingResponse(tokens(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="warning")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(N_TOKENS):
            time.sleep(GAP_S)
            self.chunk(token(i))
        self.chunk(DONE)
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, *_words: object) -> None:
        pass


def write_model(path: Path) -> None:
    """A Llama of 1.5 million random weights."""
    import gguf
    import numpy as np

    n_words, width, n_layers, n_heads, n_inner = 600, 256, 2, 4, 512
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(n_inner)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // n_heads)
    writer.add_vocab_size(n_words)
    letters = string.ascii_lowercase
    words = [b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256)), "\u2581".encode()]
    words = (words + [(a + b).encode() for a in letters for b in letters])[:n_words]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * 3 + [-1.0] * 256 + [-float(i) for i in range(n_words - 259)])
    writer.add_token_types([2, 3, 3, *([6] * 256), *([1] * (n_words - 259))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    random = np.random.default_rng(0)

    def matrix(*shape: int):
        return (random.standard_normal(shape) * 0.02).astype(np.float32)

    writer.add_tensor("token_embd.weight", matrix(n_words, width))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.add_tensor("output.weight", matrix(n_words, width))
    for layer in (f"blk.{i}." for i in range(n_layers)):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{layer}{name}.weight", np.ones(width, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"{layer}{name}.weight", matrix(width, width))
        writer.add_tensor(f"{layer}ffn_gate.weight", matrix(n_inner, width))
        writer.add_tensor(f"{layer}ffn_up.weight", matrix(n_inner, width))
        writer.add_tensor(f"{layer}ffn_down.weight", matrix(width, n_inner))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve_llama(port: int) -> None:
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.gguf"
        write_model(model)
        options = xllamacpp.CommonParams()
        options.model.path = str(model)
        options.n_parallel, options.n_ctx, options.cpuparams.n_threads = 4, 4096, 1
        options.hostnames, options.port = ["127.0.0.1"], port
        server = xllamacpp.Server(options)
        print(server.listening_address, flush=True)
        time.sleep(3600)


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    print("ready", flush=True)
    if kind == "asyncio":
        serve_asyncio(port)
    elif kind == "threads":
        http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    else:
        serve_llama(port)


if __name__ == "__main__":
    main()
