"""Build hook of the wheel: compiles the BPF programs for both architectures, adds the libraries that load them and the
emulated GPU libraries of the demo, and builds the hub's page.

One wheel serves x86-64 and arm64, because the kernel and not Python runs the compiled programs. An editable install
compiles nothing: `make bpf` does, where the tools are installed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_TAG = "py3-none-manylinux_2_17_x86_64.manylinux_2_17_aarch64"
_PACKAGES = "clang llvm bpftool libbpf-dev linux-libc-dev linux-libc-dev-arm64-cross libc6-dev gcc make"
_SKIP = "STALLSCOPE_WITHOUT_BPF"
_SKIP_PAGE = "STALLSCOPE_WITHOUT_PAGE"


def _ship_emulated_libraries(root: Path) -> None:
    """Compile the emulated GPU libraries of the demo for this machine, so that the demo needs no compiler."""
    sys.path.insert(0, str(root / "src"))
    try:
        from stallscope.demo import build

        folder = build.shipped_folder()
        shutil.rmtree(build.SHIPPED, ignore_errors=True)
        with tempfile.TemporaryDirectory() as scratch:
            built = build.build(Path(scratch))
            folder.mkdir(parents=True)
            for name in build.LIBRARIES:
                subprocess.run(["strip", "--strip-debug", "-o", folder / name, built / name], check=True)
    finally:
        sys.path.pop(0)


def _ship_plugin(root: Path) -> None:
    """Compile the libraries that jobs load: the profiler plugin of NCCL, and the library of `stallscope look`."""
    folder = root / "src" / "stallscope" / "capture" / "gpu" / "plugin" / os.uname().machine
    shutil.rmtree(folder.parent, ignore_errors=True)
    libraries = {"nccl_plugin": "libnccl-profiler-stallscope.so", "gpu_look": "libstallscope-look.so"}
    for source, name in libraries.items():
        out = os.path.relpath(folder / name, root / source)  # make splits an absolute path with spaces
        subprocess.run(["make", "--silent", "-C", str(root / source), f"OUT={out}"], check=True)
        subprocess.run(["strip", "--strip-debug", folder / name], check=True)


class BpfHook(BuildHookInterface):  # type: ignore[misc]
    """Runs `make -C bpf wheel` before the files of the wheel are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises SystemExit, with the remedy, when the programs cannot be compiled."""
        if version == "editable":
            return
        build_data["tag"] = _TAG
        self._build_page()
        if os.environ.get(_SKIP):
            return
        environment = os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
        command = ["make", "--no-print-directory", "--silent", "-C", str(Path(self.root) / "bpf"), "wheel"]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            complaint = done.stderr.strip() if done.returncode else ""
        except OSError as error:
            complaint = f"{command[0]}: {error.strerror}"
        if not complaint:
            _ship_emulated_libraries(Path(self.root))
            _ship_plugin(Path(self.root))
        if complaint:
            raise SystemExit(
                f"cannot compile the BPF programs for the wheel: {complaint}\n"
                f"Install the tools (Debian: apt-get install {_PACKAGES}), "
                f"or set {_SKIP}=1 for a wheel that reads traces but cannot trace."
            )

    def _build_page(self) -> None:
        """Build the page, unless it was built before. Raises SystemExit, with the remedy."""
        root = Path(self.root)
        is_built = (root / "src" / "stallscope" / "page" / "built" / "index.html").is_file()
        if is_built or os.environ.get(_SKIP_PAGE):
            return
        done = subprocess.run(
            [sys.executable, str(root / "setup" / "page.py")], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(
                f"cannot build the hub's page for the wheel: {done.stderr.strip()}\n"
                f"Install Node.js with npm, or set {_SKIP_PAGE}=1 for a hub without a page."
            )
