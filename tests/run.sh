#!/usr/bin/env bash
# Sets up what the checks need and runs them all: the device tests on simulated NPUs, then the main suite, whose proofs of
# the hardware adaptations use the same simulator. Two processes share the tests, a file each at a time (TEST_WORKERS=1: one).
# Arguments go to the main suite's pytest, in one process, and then the device tests are left to tests/npu/run.sh.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
export VENV_DIR="${VENV_DIR:-$ROOT/.venv}"

# One thread per process: many tests start several, and two numeric libraries with all cores each stall one another.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A torch plug-in whose driver is not there must not be loaded by `import torch`.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
# Ray starts a worker per core ahead of need; tests start the few that they use.
export RAY_enable_worker_prestart=0
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

step() { echo "== $*"; }

step "set-up"
bash tools/setup_env.sh dev
PY="$VENV_DIR/bin/python"

step "ruff"
"$PY" -m ruff check .
"$PY" -m ruff format --check .

step "mypy"
packages=()
for package in hf_formats megatron mindspeed mindspeed_llm recipes third_party tools verl vllm vllm_ascend; do
    [ -d "$package" ] && packages+=("$package")
done
"$PY" -m mypy "${packages[@]}"

step "adaptations"
"$PY" -m tools.adaptations --check

status=0
if [ $# -eq 0 ]; then
    set -- -n "${TEST_WORKERS:-2}" --dist loadfile
    step "pytest on simulated NPUs"
    env -u TORCH_DEVICE_BACKEND_AUTOLOAD bash tests/npu/run.sh "$@" || status=$?
fi

step "pytest"
"$PY" -m pytest "$@" || status=$?
exit "$status"
