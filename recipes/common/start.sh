#!/usr/bin/env bash
# start.sh RECIPE [argument ...]: makes the environment, then runs a recipe's whole job. Each recipe has a script that
# users start, which becomes this one.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$HERE/../.." && pwd)"
RECIPE="${1:?usage: start.sh RECIPE [argument ...]}"
shift
cd "$ROOT"
export VENV_DIR="${VENV_DIR:-$ROOT/.venv}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { echo "[$RECIPE] $*" >&2; }

# --help needs no packages, so it comes before set-up.
case " $* " in
    *" -h "* | *" --help "*)
        python="$VENV_DIR/bin/python"
        [ -x "$python" ] || python="$(bash tools/setup_env.sh python)"
        exec "$python" -m tools.launch "$RECIPE" "$@"
        ;;
esac

if [ "${SETUP:-yes}" = no ]; then
    if [ ! -x "$VENV_DIR/bin/python" ]; then
        say "error: SETUP=no, but VENV_DIR=$VENV_DIR has no bin/python: name an environment that has what requirements/ lists, or unset SETUP"
        exit 2
    fi
    say "SETUP=no: using $VENV_DIR as it is"
else
    bash tools/setup_env.sh
fi

case "$ROOT" in
    *:*) say "error: PYTHONPATH cannot name $ROOT, which has a colon: move the repository to another folder" && exit 2 ;;
esac
case "${JEMALLOC_PATH:-}" in
    *[\ :]*) say "error: JEMALLOC_PATH=$JEMALLOC_PATH: LD_PRELOAD ends a name at spaces and colons; copy the library to a path without them, or unset it" && exit 2 ;;
esac

if compgen -G "/dev/davinci[0-9]*" >/dev/null; then
    toolkit="${ASCEND_TOOLKIT_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"
    if [ -f "$toolkit" ]; then
        set +u # the vendor's script reads unset variables
        # shellcheck disable=SC1090
        source "$toolkit"
        set -u
    else
        say "no CANN environment at $toolkit: source it yourself, or set ASCEND_TOOLKIT_ENV"
    fi
    # shellcheck disable=SC1091
    source "$HERE/npu_env.sh"
fi

find_jemalloc() {
    local candidate
    for candidate in "${JEMALLOC_PATH:-}" /usr/local/lib/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2 \
        "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2"; do
        if [ -n "$candidate" ] && [ -f "$candidate" ]; then
            echo "$candidate"
            return
        fi
    done
}
jemalloc="$(find_jemalloc)"
if [ -n "$jemalloc" ]; then
    say "jemalloc: preloading $jemalloc"
    preload="$jemalloc${LD_PRELOAD:+:$LD_PRELOAD}"
else
    say "jemalloc: not found (JEMALLOC_PATH can name it), using the system's allocator"
    preload="${LD_PRELOAD:-}"
fi

export RECIPE_SCRIPT_PID=$$
LD_PRELOAD="$preload" "$VENV_DIR/bin/python" -m tools.launch "$RECIPE" "$@" &
launcher=$!
trap 'kill -TERM "$launcher" 2>/dev/null || true' TERM HUP
trap 'kill -INT "$launcher" 2>/dev/null || true' INT

# wait returns early when a trapped signal arrives; the launcher then still has to end its processes.
status=0
while :; do
    wait "$launcher" && status=0 || status=$?
    kill -0 "$launcher" 2>/dev/null || break
done
if [ "$status" -eq 137 ] || [ "$status" -eq 139 ] || [ "$status" -eq 134 ]; then
    say "error: the launcher (pid $launcher) was killed by signal $((status - 128)). Its processes end with it; run the same command again to continue from the last checkpoint"
fi
exit "$status"
