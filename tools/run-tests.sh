#!/usr/bin/env bash
# Runs the whole suite in two stages and prints pytest's closing lines of both at the end.
# Usage: tools/run-tests.sh PROCESSES WAITING_PROCESSES [PYTEST_ARGUMENT...]
#   1. unit, contract and simulation, side by side in PROCESSES processes
#   2. integration and engine in WAITING_PROCESSES: they start real servers and mostly wait for them;
#      what the tests of a file share is started once (tests/sharing_out.py)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
processes="$1"
waiting="$2"
shift 2
no_tests_collected=5
failed=0
ran=0
closing=()
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

# stage NAME PYTEST_ARGUMENT... -- FOLDER...
stage() {
    local name="$1" arguments=() folders=() status
    shift
    while [ "$1" != "--" ]; do arguments+=("$1") && shift; done
    shift
    for folder in "$@"; do
        if [ -d "$folder" ]; then folders+=("$folder"); fi
    done
    if [ "${#folders[@]}" -eq 0 ]; then return; fi
    .venv/bin/pytest "${arguments[@]}" --durations=5 "${folders[@]}" 2>&1 | tee "$log"
    status="${PIPESTATUS[0]}"
    closing+=("$name: $(tail -n 1 "$log")")
    if [ "$status" -eq "$no_tests_collected" ]; then return; fi
    ran=1
    if [ "$status" -ne 0 ]; then failed=1; fi
}

stage "unit, contract, simulation" --numprocesses "$processes" --dist worksteal "$@" \
    -- tests/unit tests/contract tests/simulation
stage "integration, engine" --numprocesses "$waiting" --dist loadfile "$@" -- tests/integration tests/engine

echo
if [ "$ran" -eq 0 ]; then
    echo "tests: nothing was run" >&2
    exit 1
fi
printf '%s\n' "${closing[@]}"
exit "$failed"
