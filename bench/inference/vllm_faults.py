"""Faults in vLLM's processes: a plugin of the group vllm.general_plugins, which each process of vLLM loads.

The file FAULT_FILE contains the fault and the length of a delay: "tokenizer 0.4". It is read at each request, so a
running server can have one fault after the other. Requests with {"vllm_xargs": {"rare": 1}} trigger the fault.
"""

import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fault_code import deadlock, flush_slowly, load_adapter, log_line, slow_merge, sum_squares

FILE = Path(os.environ["FAULT_FILE"])


def chosen() -> tuple[str, float]:
    name, seconds = FILE.read_text().split()
    return name, float(seconds)


def is_rare(params: Any) -> bool:
    return bool((getattr(params, "extra_args", None) or {}).get("rare"))


def install() -> None:
    """Wrap a function of each process."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    if getattr(EngineCore, "has_faults", False):
        return
    EngineCore.has_faults = True
    InputProcessor.process_inputs = front_end(InputProcessor.process_inputs)
    EngineCore.add_request = core(EngineCore.add_request)
    OpenAIServingCompletion.completion_stream_generator = writer(
        OpenAIServingCompletion.completion_stream_generator
    )


def front_end(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Before a request leaves the API server."""

    def tokenize(self: Any, request_id: str, prompt: Any, params: Any, *words: Any, **options: Any) -> Any:
        fault, seconds = chosen()
        if fault == "log_pipe":
            log_line()
        if fault == "tokenizer" and is_rare(params):
            slow_merge("ab cd", seconds)
        return process_inputs(self, request_id, prompt, params, *words, **options)

    return tokenize


def core(add_request: Callable[..., Any]) -> Callable[..., Any]:
    """In the loop of the engine core, before a request is scheduled."""
    spinning: list[threading.Thread] = []

    def add(self: Any, request: Any, *words: Any, **options: Any) -> Any:
        fault, _ = chosen()
        if fault == "spin" and not spinning:
            spinning.append(threading.Thread(target=spin, daemon=True))
            spinning[0].start()
        if is_rare(request.sampling_params):
            if fault == "adapter":
                load_adapter(FILE.parent)
            if fault == "deadlock":
                deadlock()
        return add_request(self, request, *words, **options)

    return add


def spin() -> None:
    """Holds the interpreter lock for half a second in each second, while this fault is chosen."""
    while True:
        time.sleep(1.0)
        fault, seconds = chosen()
        if fault == "spin":
            sum_squares(int(15_000_000 * seconds))


def writer(generator: Callable[..., AsyncIterator[str]]) -> Callable[..., AsyncIterator[str]]:
    """Between two tokens of a response."""

    async def write(self: Any, request: Any, *words: Any, **options: Any) -> AsyncIterator[str]:
        fault, seconds = chosen()
        is_slow = fault == "writer_sleep" and (request.vllm_xargs or {}).get("rare")
        i = 0
        async for data in generator(self, request, *words, **options):
            if is_slow and i == 5:
                flush_slowly(seconds)
            i += 1
            yield data

    return write
