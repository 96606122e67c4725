"""Builds the container images with buildah, from scratch: images.py WHEEL OUT [agent] [hub] [publish]

The image `publish` is the hub with deltalake, which is a third of it, for the CronJob that maintains Delta tables.

An image contains stallscope, its own Python and certificates of authorities, out of Debian packages. It has no shell,
no package manager and no compiler. OUT gets NAME.tar (OCI archive) and NAME.cdx.json (components, CycloneDX).
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import own_python
from own_python import run

PREFIX = "/usr/lib/stallscope"
_BUILDAH = ("buildah", "--storage-driver", "vfs")
_EPOCH = "1580601600"
_IMAGES = {
    "agent": ("export,gpu", "0:0", ["trace", "--quiet"], "Traces the GPU jobs of a node with eBPF"),
    "hub": ("shared", "65532:65532", ["hub"], "Receives the traces of all nodes and diagnoses jobs"),
    "publish": ("publish", "65532:65532", ["hub", "publish"], "Maintains Delta tables of the data of hubs"),
}
_USERS = "root:x:0:0:root:/root:/sbin/nologin\nstallscope:x:65532:65532:stallscope:/var/lib/stallscope:/sbin/nologin\n"
_GROUPS = "root:x:0:\nstallscope:x:65532:\n"


def build(name: str, wheel: Path, out: Path, version: str) -> None:
    """Build one image. Raises SystemExit with the failed command."""
    extras, user, words, description = _IMAGES[name]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        packages = own_python.build(root / PREFIX.lstrip("/"), wheel, extras, PREFIX)
        _add_system_files(root)
        components = _components(root / PREFIX.lstrip("/"), packages)
        sbom = json.dumps(_sbom(name, version, components), indent=1, sort_keys=True) + "\n"
        (root / "usr/share/doc/stallscope").mkdir(parents=True)
        (root / "usr/share/doc/stallscope/sbom.cdx.json").write_text(sbom)
        (out / f"{name}.cdx.json").write_text(sbom)
        _set_times(root)
        _commit(name, root, out, user=user, words=words, description=description, version=version)


def _add_system_files(root: Path) -> None:
    """Users, certificates of authorities, and the folders that volumes are mounted on."""
    for folder in (
        "etc/stallscope",
        "etc/ssl/certs",
        "var/lib/stallscope",
        "run/stallscope",
        "tmp",
        "usr/bin",
        "proc",
        "sys",
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text(_USERS)
    (root / "etc/group").write_text(_GROUPS)
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs")
    (root / "usr/bin/stallscope").symlink_to(f"{PREFIX}/bin/stallscope")
    # Modules with a search path of their own, such as pyarrow, find libstdc++ only in the loader's default folders.
    (root / f"usr/lib/{os.uname().machine}-linux-gnu").symlink_to(f"{PREFIX}/lib")
    for path in ("var/lib/stallscope", "run/stallscope"):
        os.chown(root / path, 65532, 65532)


def _components(tree: Path, packages: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The Debian packages and the Python packages in the tree."""
    components = [("deb", "debian/", name, version) for name, version in packages]
    for folder in sorted((tree / "packages").glob("*.dist-info")):
        metadata = PathDistribution(folder).metadata
        components.append(("pypi", "", re.sub(r"[-_.]+", "-", metadata["Name"]).lower(), metadata["Version"]))
    return [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:{kind}/{space}{name}@{version.replace('+', '%2B')}",
            "bom-ref": f"{kind}:{name}",
        }
        for kind, space, name, version in sorted(components)
    ]


def _sbom(name: str, version: str, components: list[dict[str, Any]]) -> dict[str, Any]:
    identity = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{identity}",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": f"stallscope-{name}", "version": version}},
        "components": components,
    }


def _set_times(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        os.utime(path, (int(_EPOCH), int(_EPOCH)), follow_symlinks=False)


def _commit(
    name: str, root: Path, out: Path, *, user: str, words: list[str], description: str, version: str
) -> None:
    container = _output(*_BUILDAH, "from", "scratch")
    try:
        run(*_BUILDAH, "copy", "--quiet", container, root, "/")
        labels = {
            "title": f"stallscope-{name}",
            "description": description,
            "version": version,
            "licenses": "Apache-2.0",
            "documentation": "docs/install.md",
        }
        run(
            *(*_BUILDAH, "config", "--user", user, "--entrypoint", json.dumps(["/usr/bin/stallscope"])),
            *("--cmd", " ".join(words), "--env", f"PATH=/usr/bin:{PREFIX}/bin", "--env", "HOME=/tmp"),
            *("--env", "XDG_CACHE_HOME=/tmp/cache", "--workingdir", "/var/lib/stallscope"),
            *(
                word
                for key, text in labels.items()
                for word in ("--label", f"org.opencontainers.image.{key}={text}")
            ),
            container,
        )
        layout = root.parent / "oci"
        target = f"oci:{layout}:stallscope-{name}:{version}"
        run(
            *_BUILDAH,
            "commit",
            "--quiet",
            "--disable-compression=false",
            "--timestamp",
            _EPOCH,
            "--format",
            "oci",
            container,
            target,
        )
        _pack(layout, out / f"{name}.tar")
    finally:
        run(*_BUILDAH, "rm", container)


def _pack(layout: Path, archive: Path) -> None:
    """The OCI layout as an archive: by name and with one time, so that two builds are equal."""
    with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(layout.rglob("*")):
            entry = tarfile.TarInfo(str(path.relative_to(layout)))
            entry.mtime = int(_EPOCH)
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            else:
                entry.size = path.stat().st_size
                with path.open("rb") as data:
                    tar.addfile(entry, data)


def _write_checksums(out: Path) -> None:
    """The checksums of all files in the folder, as dist.sh writes them before there are images."""
    sums = out / "SHA256SUMS"
    paths = sorted(path for path in out.iterdir() if path.is_file() and path != sums)
    lines = []
    for path in paths:
        with path.open("rb") as data:
            lines.append(f"{hashlib.file_digest(data, 'sha256').hexdigest()}  {path.name}\n")
    sums.write_text("".join(lines))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"setup: {' '.join(command[:4])}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    os.umask(0o022)
    target = Path(sys.argv[2]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    number = Path(sys.argv[1]).name.split("-")[1]
    for image in sys.argv[3:] or _IMAGES:
        build(image, Path(sys.argv[1]).resolve(), target, number)
    _write_checksums(target)
