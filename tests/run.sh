#!/usr/bin/env bash
# Sets up what the checks need and runs them: ruff, mypy, adaptations, the device tests on simulated NPUs, the main suite.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tests/run.sh [--quick | --all] [pytest arguments]

  (no option)  everything but the tests marked slow; this is what CI runs
  --quick      ruff, mypy and the tests whose files start no process
  --all        slow tests too, the default run's tests again on torch 2.5.1, the stack of CANN 8.2.RC1, and --quick on every
               other Python of this machine (tests/pythons.sh)

With pytest arguments the main suite runs them in one process, and the device tests are left to tests/npu/run.sh.
CANN82_VENV_DIR  the environment of that stack (default: .venv-cann82 in the repository); 6 GiB on x86_64
TEST_WORKERS  processes that share the test files, a file each at a time (default: 3, of which some always wait; 2 with
              --quick, where none waits)
TEXT
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
export VENV_DIR="${VENV_DIR:-$ROOT/.venv}"

# One thread per process: many tests start several, and two numeric libraries with all cores each stall one another.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# `import torch` must not load a torch plug-in whose driver is not there.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
# Ray would start a worker per core ahead of need, and as many for the first driver; tests start the few that they use.
export RAY_enable_worker_prestart=0 RAY_prestart_worker_first_driver=0
# Hundreds of processes import the same modules; images often forbid to keep them compiled, which costs half of the run.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

step() { echo "== $*"; }

which=default
case " $* " in
    *" -h "* | *" --help "*) usage && exit 0 ;;
esac
case "${1:-}" in
    --quick | --all) which="${1#--}" && shift ;;
esac
workers=3
case "$which" in
    quick) selected=(-m "not slow and not processes") workers=2 ;;
    all) selected=(-m "" -rs) ;;
    default) selected=() ;;
esac
with_device_tests=no is_whole=no
if [ $# -eq 0 ]; then
    is_whole=yes
    # A process that crashes ends the run, which names the test; with another in its place pytest-xdist waits for ever.
    set -- -n "${TEST_WORKERS:-$workers}" --dist loadfile --no-loadscope-reorder --max-worker-restart 0
    [ "$which" = quick ] || with_device_tests=yes
fi

step "set-up"
bash tools/setup_env.sh dev
PY="$VENV_DIR/bin/python"
if [ "$with_device_tests" = yes ]; then
    # The last lines of the run say it once more (tests/conftest.py).
    if DEVICE_TESTS_SKIPPED="$(env -u TORCH_DEVICE_BACKEND_AUTOLOAD bash tests/npu/run.sh --set-up)"; then
        unset DEVICE_TESTS_SKIPPED
    else
        [ $? -eq 77 ] || { echo "$DEVICE_TESTS_SKIPPED" && exit 1; }
        export DEVICE_TESTS_SKIPPED with_device_tests=no
    fi
fi

step "ruff"
"$PY" -m ruff check .
"$PY" -m ruff format --check .

packages=()
for package in hf_formats megatron mindspeed mindspeed_llm recipes third_party tools verl vllm vllm_ascend; do
    [ -d "$package" ] && packages+=("$package")
done
# mypy and a pytest run beside one another; the output of the one in the background is printed when it has ended.
background=""
output="$(mktemp)"
trap '[ -z "$background" ] || kill "$background" 2>/dev/null || true; rm -f "$output"' EXIT
status=0
join() {
    wait "$background" || status=$?
    background=""
    step "$1"
    cat "$output"
}

step "adaptations"
"$PY" -m tools.workshop.adaptations --check

if [ "$which" = quick ]; then
    "$PY" -m pytest "${selected[@]}" "$@" >"$output" 2>&1 &
    background=$!
    step "mypy"
    "$PY" -m mypy "${packages[@]}" || status=$?
    join "pytest"
    exit "$status"
fi

"$PY" -m mypy "${packages[@]}" >"$output" 2>&1 &
background=$!
if [ "$with_device_tests" = yes ]; then
    step "pytest on simulated NPUs"
    env -u TORCH_DEVICE_BACKEND_AUTOLOAD bash tests/npu/run.sh "${selected[@]}" "$@" || status=$?
fi
join "mypy"
step "pytest"
"$PY" -m pytest "${selected[@]}" "$@" || status=$?

# What needs a newer torch is marked needs_torch and skipped here.
if [ "$which" = all ] && [ "$is_whole" = yes ]; then
    step "pytest on torch 2.5.1 (STACK=cann82)"
    older="${CANN82_VENV_DIR:-$ROOT/.venv-cann82}"
    if STACK=cann82 VENV_DIR="$older" bash tools/setup_env.sh dev; then
        "$older/bin/python" -m pytest "$@" || status=$?
    else
        echo "FAILED: no test ran on torch 2.5.1, because its environment could not be made (the lines above say why)"
        status=1
    fi
    step "every other Python"
    bash tests/pythons.sh || status=$?
fi
exit "$status"
