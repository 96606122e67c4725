#!/bin/sh
# Puts into .carry/ what a machine with GPUs may lack and cannot fetch: the BPF programs, libbpf and libelf (of
# Debian's packages), and the Python packages of the command line. NumPy comes with PyTorch. Run it where the BPF
# programs are built; PYTHON_THERE is the version of that machine's Python.
set -eu
cd "$(dirname "$0")/../.."
PYTHON_THERE=${PYTHON_THERE:-3.12}
make --no-print-directory bpf
mkdir -p .carry/lib .carry/debian
cp -f src/stallscope/capture/*.bpf.o .carry/
git describe --always --dirty --abbrev=12 >.carry/commit
if [ ! -e .carry/lib/libelf.so.1 ]; then
	(cd .carry/debian && apt-get -qq download libbpf1 libelf1)
	for package in .carry/debian/*.deb; do dpkg -x "$package" .carry/debian; done
	find .carry/debian \( -name 'libbpf.so.1' -o -name 'libelf.so.1' \) -exec sh -c \
		'cp -L "$1" .carry/lib/' _ {} \;
fi
rm -rf .carry/debian
if [ ! -e .carry/bin/py-spy ]; then
	mkdir -p .carry/bin
	"${PYTHON:-.venv/bin/python}" -m pip download --quiet --disable-pip-version-check --no-deps --dest .carry/spy py-spy
	unzip -qo .carry/spy/*.whl -d .carry/spy
	find .carry/spy -name py-spy -type f -exec install -m 755 {} .carry/bin/ \;
	rm -rf .carry/spy
fi
if [ ! -d .carry/site ]; then
	"${PYTHON:-.venv/bin/python}" -m pip install --quiet --disable-pip-version-check --target .carry/site \
		--python-version "$PYTHON_THERE" --only-binary=:all: --no-compile 'typer>=0.15' 'rich>=13' 'pyyaml>=6' \
		'nvidia-ml-py>=12'
fi
du -sh .carry
