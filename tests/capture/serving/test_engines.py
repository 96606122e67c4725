"""Which processes belong to an inference engine, from a /proc that the tests write."""

from pathlib import Path

import pytest

from stallscope.capture.serving.engines import Engines, engine_of, listens, model_of

COMMANDS = (
    ("vllm", "facebook/opt-125m", "/usr/bin/python3 /usr/local/bin/vllm serve facebook/opt-125m --port 8000"),
    ("vllm", "m", "python3 -m vllm.entrypoints.openai.api_server --model /models/m/"),
    ("vllm", "", "VLLM::EngineCore"),
    ("sglang", "m", "python -m sglang.launch_server --model-path=/data/m"),
    ("sglang", "", "sglang::scheduler_TP0"),
    ("triton", "models", "tritonserver --model-repository=/models"),
    ("tgi", "org/m", "text-generation-launcher --model-id org/m"),
    ("tensorrt-llm", "m", "python /usr/bin/trtllm-serve serve m"),
    ("llama.cpp", "tiny.gguf", "./llama-server -m models/tiny.gguf --port 1"),
    ("ollama", "", "/usr/bin/ollama serve"),
    ("", "", "vim vllm.py"),
    ("", "", "grep -r vllm serve"),
    ("", "", "/usr/sbin/nginx -g daemon off;"),
    ("", "", "python train.py --model resnet"),
)


@pytest.mark.parametrize(("engine", "model", "command"), COMMANDS)
def test_an_engine_is_known_by_its_command_line(engine, model, command):
    words = command.replace(" ", "\0") + "\0"
    assert engine_of(words) == engine
    if engine:
        assert model_of(words) == model


def process(
    proc: Path,
    pid: int,
    command: str,
    *,
    parent: int = 1,
    maps: str = "",
    is_server: bool = True,
    rank: str = "",
) -> int:
    home = proc / str(pid)
    home.mkdir(parents=True)
    (home / "cmdline").write_text(command.replace(" ", "\0") + "\0")
    (home / "stat").write_text(f"{pid} (x) S {parent} 0 0")
    (home / "maps").write_text(maps)
    (home / "environ").write_text(f"RANK={rank}\0" if rank else "")
    for folder in ("fd", "net"):
        (home / folder).mkdir()
    (home / "fd" / "3").symlink_to(f"socket:[{pid}]")
    state = "0A" if is_server else "01"
    (home / "net" / "tcp").write_text(
        f"  sl ...\n   0: 0100007F:1F90 00000000:0000 {state} 0:0 00:0 0 0 0 {pid} 1\n"
    )
    (home / "exe").symlink_to("/usr/bin/python3.12" if "python" in command else "/bin/x")
    return pid


TORCH = "7f00-7f10 r-xp 0 08:01 7 /usr/lib/python3/torch/lib/libtorch_cpu.so\n"


def test_a_python_program_counts_only_as_a_server_with_a_runtime_or_if_chosen(tmp_path):
    plain, chosen = process(tmp_path, 10, "python app.py"), process(tmp_path, 11, "python app.py")
    runtime = process(tmp_path, 12, "python app.py", maps=TORCH)
    llama = process(tmp_path, 13, "python app.py", maps=TORCH.replace("libtorch_cpu", "libllama"))
    process(tmp_path, 14, "nginx", maps=TORCH)
    process(tmp_path, 15, "python train.py", maps=TORCH, is_server=False)
    process(tmp_path, 16, "python train.py", maps=TORCH, rank="0")
    new, ended = Engines(lambda: range(10, 17), chosen=(chosen,), proc=tmp_path).scan(0)
    assert {each.pid: each.name for each in new} == {chosen: "python", runtime: "python", llama: "llama.cpp"}
    assert ended == []
    assert plain not in {each.pid for each in new}


def test_the_program_whose_code_is_the_model_belongs_to_triton(tmp_path):
    model = process(tmp_path, 10, "python serve_model.py", is_server=False)
    started = process(
        tmp_path, 11, "/opt/cache/pytriton/workspace_ab/tritonserver/bin/tritonserver", parent=model
    )
    shell = process(tmp_path, 12, "bash")
    other = process(tmp_path, 13, "/opt/tritonserver/bin/tritonserver --model-repository=/m", parent=shell)
    new, _ = Engines(lambda: range(10, 14), proc=tmp_path).scan(0)
    assert {each.pid: each.group_pid for each in new} == {started: started, model: started, other: other}


def test_a_child_belongs_to_the_engine_of_its_parent(tmp_path):
    server = process(tmp_path, 20, "python -m vllm.entrypoints.openai.api_server --model m")
    worker = process(tmp_path, 21, "python -c from_multiprocessing", parent=server)
    new, _ = Engines(lambda: (server, worker), proc=tmp_path).scan(0)
    assert [(each.pid, each.name, each.model, each.group_pid) for each in new] == [
        (server, "vllm", "m", server),
        (worker, "vllm", "m", server),
    ]


def test_a_child_with_a_smaller_number_than_its_parent_belongs_to_its_engine(tmp_path):
    api = process(tmp_path, 32478, "python /usr/bin/vllm serve m")
    core = process(tmp_path, 1694, "VLLM::EngineCore", parent=api)
    worker = process(tmp_path, 9, "python", parent=core)
    new, _ = Engines(lambda: (worker, core, api), proc=tmp_path).scan(0)
    assert {each.pid: each.group_pid for each in new} == dict.fromkeys((api, core, worker), api)


def test_children_that_were_recognised_before_their_parent_get_its_group(tmp_path):
    front = process(tmp_path, 10, "python front.py")
    core = process(tmp_path, 11, "VLLM::EngineCore", parent=front)
    worker = process(tmp_path, 12, "python", parent=core)
    engines = Engines(lambda: (front, core, worker), proc=tmp_path)
    new, _ = engines.scan(0)
    assert {each.pid: each.group_pid for each in new} == {core: core, worker: core}
    (tmp_path / str(front) / "maps").write_text(TORCH)
    new, _ = engines.scan(10**9)
    assert {each.pid: each.group_pid for each in new} == dict.fromkeys((front, core, worker), front)


def test_a_process_is_examined_again_as_it_may_load_a_runtime_later(tmp_path):
    pid = process(tmp_path, 30, "python app.py")
    engines = Engines(lambda: (pid,), proc=tmp_path)
    assert engines.scan(0) == ([], [])
    (tmp_path / "30" / "maps").write_text(TORCH)
    assert engines.scan(10**8) == ([], [])
    assert [each.name for each in engines.scan(10**9)[0]] == ["python"]


def test_an_ended_process_is_reported_once(tmp_path):
    present = [process(tmp_path, 40, "ollama serve")]
    engines = Engines(lambda: tuple(present), proc=tmp_path)
    engines.scan(0)
    present.clear()
    assert engines.scan(1) == ([], [40])
    assert engines.scan(2) == ([], [])


@pytest.mark.parametrize(
    ("row", "is_listening"),
    [
        ("0000: 00000002 00000000 00010000 0005 01 77 @cuda-uvmfd-4026531836-50@", False),
        ("0000: 00000002 00000000 00010000 0001 01 77 @tmp/nccl-socket-0-1f", False),
        ("0000: 00000002 00000000 00010000 0001 01 77 /run/server.sock", True),
        ("0000: 00000003 00000000 00000000 0001 03 77 /run/server.sock", False),
    ],
)
def test_sockets_of_cuda_s_libraries_do_not_make_a_process_a_server(tmp_path, row, is_listening):
    process(tmp_path, 50, "python train.py", maps=TORCH, is_server=False)
    folder = tmp_path / "50"
    (folder / "fd").mkdir(exist_ok=True)
    (folder / "fd" / "5").symlink_to("socket:[77]")
    (folder / "net").mkdir(exist_ok=True)
    (folder / "net" / "unix").write_text(f"Num RefCount Protocol Flags Type St Inode Path\n{row}\n")
    assert listens(tmp_path, 50) is is_listening
