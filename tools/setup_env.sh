#!/usr/bin/env bash
# Makes the project's virtual environment from the pinned requirements, or says that it is already made.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tools/setup_env.sh [base|dev]

  base   what a run needs (default); torch_npu is added on a machine that has NPUs
  dev    base, and what the tests and checks need

Environment: VENV_DIR  where to make it (default: .venv in the repository)
             PYTHON    the interpreter to make it with (default: the first python3 that is 3.11 or newer)

Afterwards run things with "$VENV_DIR/bin/python", or `source "$VENV_DIR/bin/activate"`.
TEXT
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_DIR="${VENV_DIR:-$ROOT/.venv}"
LAYER="${1:-base}"
REQUIREMENTS="$ROOT/requirements"

say() { echo "[setup] $*" >&2; }
die() {
    echo "[setup] error: $*" >&2
    exit 1
}

case "$LAYER" in
    -h | --help) usage && exit 0 ;;
    base | dev) ;;
    *) usage >&2 && die "unknown layer '$LAYER': expected base or dev" ;;
esac

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        elif [ "$candidate" = "${PYTHON:-}" ]; then
            die "PYTHON=$PYTHON is not a Python 3.11 or newer that runs: name another, or unset PYTHON"
        fi
    done
    die "no Python 3.11 or newer found: install one (Debian: apt-get install python3 python3-venv) or set PYTHON=/path/to/python3"
}

has_npu() {
    compgen -G "/dev/davinci[0-9]*" >/dev/null || command -v npu-smi >/dev/null 2>&1
}

check_venv_dir() {
    if [ -e "$VENV_DIR" ] && [ ! -e "$VENV_DIR/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV_DIR" 2>/dev/null)" ]; then
        die "VENV_DIR=$VENV_DIR exists and is not a virtual environment: name another folder, or empty it"
    fi
    mkdir -p "$VENV_DIR" 2>/dev/null && [ -w "$VENV_DIR" ] || die "cannot write to $VENV_DIR: set VENV_DIR to a folder that you can write to"
}

# The stamp holds what the environment was made from, so it goes stale by itself when a pin or the Python changes.
fingerprint() {
    {
        "$PYTHON_FOUND" -c 'import sys; print(sys.version, sys.base_prefix)'
        echo "$WITH_NPU"
        cat "$REQUIREMENTS"/*.txt
    } | "$PYTHON_FOUND" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

is_current() {
    [ -x "$VENV_DIR/bin/python" ] && [ "$(cat "$VENV_DIR/.stamp-$LAYER" 2>/dev/null)" = "$WANTED" ]
}

make_venv() {
    "$PYTHON_FOUND" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$PYTHON_FOUND cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)"
    # Without a stamp the folder is new or what an interrupted install left: neither is worth keeping.
    if ! compgen -G "$VENV_DIR/.stamp-*" >/dev/null || ! "$VENV_DIR/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making $VENV_DIR with $("$PYTHON_FOUND" --version)"
        "$PYTHON_FOUND" -m venv --clear "$VENV_DIR"
    fi
}

install_packages() {
    local files=(-r "$REQUIREMENTS/base.txt")
    [ "$LAYER" = base ] || files+=(-r "$REQUIREMENTS/$LAYER.txt")
    [ "$WITH_NPU" = no ] || files+=(-r "$REQUIREMENTS/npu.txt")
    say "installing the $LAYER layer$([ "$WITH_NPU" = no ] || echo ' and torch_npu') (a few minutes the first time; log: $VENV_DIR/install.log)"
    # The pinned torch rides in the same command as everything else, so no other build can be drawn in by a dependency.
    if ! "$VENV_DIR/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        -c "$REQUIREMENTS/constraints.txt" "${files[@]}" >"$VENV_DIR/install.log" 2>&1; then
        tail -n 25 "$VENV_DIR/install.log" >&2
        die "pip could not install the packages (the lines above are the end of $VENV_DIR/install.log): check the network and the disk, then run this again"
    fi
}

PYTHON_FOUND="$(find_python)"
WITH_NPU=no
if has_npu; then WITH_NPU=yes; fi
WANTED="$(fingerprint)"

if is_current; then
    say "$VENV_DIR is up to date ($LAYER)"
    exit 0
fi
check_venv_dir
if command -v flock >/dev/null 2>&1; then
    # The folder itself is the lock: it survives --clear, and leaves no file behind.
    exec 9<"$VENV_DIR"
    flock 9
    if is_current; then
        say "$VENV_DIR was made by another run"
        exit 0
    fi
fi
started=$SECONDS
make_venv
rm -f "$VENV_DIR"/.stamp-*
install_packages
for layer in base "$LAYER"; do
    echo "$WANTED" >"$VENV_DIR/.stamp-$layer.tmp"
    mv "$VENV_DIR/.stamp-$layer.tmp" "$VENV_DIR/.stamp-$layer"
done
say "ready in $((SECONDS - started)) s: $VENV_DIR/bin/python"
