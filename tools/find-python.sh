#!/usr/bin/env bash
# Prints a Python that the project runs on: python3.11 if there is one, else a newer python3.
set -euo pipefail

for candidate in python3.11 python3; do
    if command -v "$candidate" >/dev/null &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate has no venv module; on Debian: apt-get install ${candidate}-venv" >&2
            continue
        fi
        command -v "$candidate"
        exit 0
    fi
done
echo "Readyplane needs Python 3.11 or newer, with its venv module; neither python3.11 nor python3 is one" >&2
exit 1
