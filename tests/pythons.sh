#!/usr/bin/env bash
# Runs `tests/run.sh --quick` on every other Python of this machine that the project takes, with a line of result for each.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tests/pythons.sh [--list]

Pythons are looked for on PATH, as /usr/bin/python3 and among pyenv's (PYENV_ROOT). Each gets an environment of its own, 2.5 GB,
or 5.5 where torch's CPU build cannot be had. The one of VENV_DIR is left out. --list prints them and runs nothing.

Environment: VENV_DIR         the project's environment (default: .venv)
             PYTHONS_DIR      the environments and the logs (default: .venv-pythons in the repository)
TEXT
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
VENV_DIR="${VENV_DIR:-$ROOT/.venv}"
PYTHONS_DIR="${PYTHONS_DIR:-$ROOT/.venv-pythons}"

case "${1:-}" in
    "" | --list) ;;
    *) usage && exit 0 ;;
esac

# Version, where it is installed, and itself; nothing for a Python that set-up refuses. Shims and links name one twice.
DESCRIBE='import platform, sys
if (3, 11) <= sys.version_info[:2] <= (3, 14):
    print(platform.python_version(), sys.base_prefix, getattr(sys, "_base_executable", sys.executable), sep="\t")'

describe_all() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.14 /usr/bin/python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
        "$candidate" -c "$DESCRIBE" 2>/dev/null || true
    done | sort -u -t "$(printf '\t')" -k 1,2
}

own="$("$VENV_DIR/bin/python" -c "$DESCRIBE" 2>/dev/null | cut -f 1,2 || true)"
status=0
while IFS=$'\t' read -r version prefix python; do
    [ "$version"$'\t'"$prefix" != "$own" ] || continue
    if [ "${1:-}" = --list ]; then
        echo "Python $version: $python"
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "Python $version: SKIPPED, because $python has no module venv (Debian: apt-get install python3-venv)"
    else
        folder="$PYTHONS_DIR/$version" log="$PYTHONS_DIR/$version.log"
        mkdir -p "$PYTHONS_DIR"
        result=passed
        PYTHON="$python" VENV_DIR="$folder" bash tests/run.sh --quick >"$log" 2>&1 </dev/null || result=FAILED status=1
        echo "Python $version: $result, $(tail -n 1 "$log") ($python; log: $log)"
    fi
done < <(describe_all)
exit "$status"
