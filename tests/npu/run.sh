#!/usr/bin/env bash
# Runs the device tests on simulated NPUs: makes the environment, builds the fake libraries, runs pytest.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tests/npu/run.sh [--set-up | pytest arguments]        (default: all of tests/npu)

--set-up makes the environment and the fake libraries and runs nothing; where they cannot be made, its exit status is 77.

Environment: VENV_DIR      the project's environment (default: .venv), made when missing
             NPU_VENV_DIR  the same with torch_npu over it (default: .venv-npu), made when missing
             NPU_TESTS     "required": a skip is a failure
tests/npu/env.sh lists the settings of the devices.
TEXT
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$ROOT"
export VENV_DIR="${VENV_DIR:-$ROOT/.venv}"
export NPU_VENV_DIR="${NPU_VENV_DIR:-$ROOT/.venv-npu}"

first="${1:-}"
case " $* " in
    *" -h "* | *" --help "*) usage && exit 0 ;;
esac

skip() {
    echo "SKIPPED tests/npu: $*"
    [ "${NPU_TESTS:-}" != required ] || exit 1
    [ "$first" != --set-up ] || exit 77
    exit 0
}

[ "$(uname -s)" = Linux ] || skip "torch_npu has wheels for Linux only, this is $(uname -s)"
for tool in g++ nm; do
    command -v "$tool" >/dev/null || skip "no $tool on PATH to build the fake libraries with (Debian: apt-get install g++)"
done
# An environment that tools/setup_env.sh did not make is used as it is.
if ! [ -x "$VENV_DIR/bin/python" ] || compgen -G "$VENV_DIR/.stamp-*" >/dev/null; then
    bash tools/setup_env.sh dev
fi
said="$(bash tools/setup_env.sh simulator 2>&1)" || skip "$said"
echo "$said" >&2
# shellcheck source=tests/npu/env.sh
source tests/npu/env.sh
[ "$first" != --set-up ] || exit 0

paths=(tests/npu)
for argument in "$@"; do
    [ -e "${argument%%::*}" ] && paths=()
done
exec "$NPU_PYTHON" -m pytest "${paths[@]}" "$@"
