#!/usr/bin/env bash
# Turns proto/readyplane/**/*.proto into Python modules and their type stubs.
# Usage: tools/generate.sh [OUTPUT_ROOT]   (default: the repository root)
# The import root is proto/, so proto/readyplane/v1/x.proto becomes readyplane/v1/x_pb2.py.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
output="${1:-.}"
python="${GENERATOR_PYTHON:-.venv-gen/bin/python}"

if [ ! -x "$python" ]; then
    echo "tools/generate.sh: $python is missing; run 'make .venv-gen/stamp' first" >&2
    exit 3
fi
if [ ! -d proto/readyplane ]; then
    echo "tools/generate.sh: no proto/readyplane folder, nothing to generate"
    exit 0
fi

mapfile -t protos < <(find proto/readyplane -name '*.proto' | LC_ALL=C sort)
if [ "${#protos[@]}" -eq 0 ]; then
    echo "tools/generate.sh: no .proto file, nothing to generate"
    exit 0
fi

mkdir -p "$output"
# Stale modules of a removed .proto must go too: the output is exactly what the contract says.
if [ -d "$output/readyplane" ]; then
    find "$output/readyplane" -name '*_pb2*.py*' -not -path '*/__pycache__/*' -type f -delete
fi

# protoc finds its mypy plugins on PATH.
PATH="$(dirname "$(realpath --no-symlinks "$python")"):$PATH" "$python" -m grpc_tools.protoc \
    --proto_path=proto \
    --python_out="$output" \
    --grpc_python_out="$output" \
    --mypy_out=quiet:"$output" \
    --mypy_grpc_out=quiet:"$output" \
    "${protos[@]}"

# The gRPC generator writes a service module for every file; one without a service is noise.
for proto in "${protos[@]}"; do
    stem="$output/${proto#proto/}"
    stem="${stem%.proto}"
    if ! grep -qE '^service ' "$proto"; then
        rm -f "${stem}_pb2_grpc.py" "${stem}_pb2_grpc.pyi"
    fi
done
echo "tools/generate.sh: ${#protos[@]} file(s) -> $output/readyplane"
