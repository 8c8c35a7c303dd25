# Source this: the shell and everything it starts then has fake Ascend devices under the real torch_npu.
#
#     source tests/npu/env.sh && "$NPU_PYTHON" -c 'import torch; print(torch.ones(2, device="npu"))'
#
# NPU_VENV_DIR        the environment with torch_npu (default: .venv-npu in the repository; tests/npu/run.sh makes it)
# FAKE_NPU_COUNT      devices (2)              FAKE_NPU_MEM_GB   memory of each, may be a fraction (64)
# FAKE_NPU_SOC        name (Ascend910B2)       FAKE_NPU_POISON   0: new memory is not filled with NaN
# FAKE_NPU_CANN       version (8.3.RC1): what CANN says, and which limits its kernels have
# FAKE_NPU_STREAMS    streams of each device (1984)
# ASCEND_HOME_PATH    a toolkit whose version decides limits of kernels that have changed (none: the newest)
# FAKE_NPU_CALLS_DIR  folder where every process writes the name of each op that it runs, once, in <pid>.txt, and how often
#                     in which phase and with which types, in <pid>.phases (python -m tools.plan.op_costs)
# shellcheck shell=bash

_npu_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export NPU_VENV_DIR="${NPU_VENV_DIR:-$_npu_root/.venv-npu}"
export NPU_PYTHON="$NPU_VENV_DIR/bin/python"
if ! [ -x "$NPU_PYTHON" ]; then
    echo "[npusim] no environment in NPU_VENV_DIR=$NPU_VENV_DIR: bash tests/npu/run.sh makes it" >&2
    return 1
fi
_npu_libraries="$("$NPU_PYTHON" "$_npu_root/tests/npu/npusim/build.py")" || return 1

export LD_LIBRARY_PATH="$_npu_libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# tests/npu holds the package npusim and its entry point, which `import torch` loads.
export PYTHONPATH="$_npu_root:$_npu_root/tests/npu${PYTHONPATH:+:$PYTHONPATH}"
export TORCH_DEVICE_BACKEND_AUTOLOAD=1
# torch_npu would run its host code on a second thread, beside the CPU kernels.
export TASK_QUEUE_ENABLE=0
export FAKE_NPU_POISON="${FAKE_NPU_POISON:-1}"
# A rank that waits for one that does not come fails after this; the default of HCCL is half an hour.
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-240}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset ASCEND_HOME_PATH _npu_root _npu_libraries
