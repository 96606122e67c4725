#!/bin/sh
# Puts the packages of the small servers into .carry/inference.tar.xz, for a machine with Python 3.12 and NumPy but no
# network. The library of llama.cpp is stripped (106 MB to 26 MB).
set -eu
cd "$(dirname "$0")/../.."
[ -e .carry/inference.tar.xz ] && exit
folder=$(mktemp -d)
"${PYTHON:-.venv/bin/python}" -m pip install --quiet --disable-pip-version-check --target "$folder" --no-compile \
	--no-deps --only-binary=:all: --python-version 3.12 'uvicorn>=0.30' 'starlette>=0.40' 'gguf>=0.10' \
	'xllamacpp>=2025.1' 'pyzmq>=26' 'h11>=0.14' 'anyio>=4' 'click>=8' 'idna>=3' 'typing-extensions>=4' 'tqdm>=4' \
	'requests>=2' 'urllib3>=2' 'certifi' 'charset-normalizer>=3' 'pyyaml>=6'
strip "$folder"/xllamacpp/*.so
rm -rf "$folder/bin"
tar -C "$folder" -cf - . | xz -T2 -3 >.carry/inference.tar.xz
rm -rf "$folder"
du -sh .carry/inference.tar.xz
