#!/usr/bin/env bash
# The tests on a real vLLM. Makes its environment first, and says so where it cannot be had.
# Usage: tools/test-vllm.sh [PYTEST_ARGUMENT...]
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! make --no-print-directory vllm-env; then
    echo "test-vllm: not run: the environment of a real vLLM cannot be made here (docs/vllm.md)" >&2
    exit 0
fi
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
READYPLANE_TEST_VLLM=1 .venv/bin/pytest -n 0 -v -s --timeout 1800 tests/vllm "$@" 2>&1 |
    tee "$log"
status="${PIPESTATUS[0]}"
echo
grep -h -E '^(prefix|compile|killed|start) ?[a-z ]*:' "$log" || true
echo "test-vllm: $(tail -n 1 "$log" | tr -d '=')"
exit "$status"
