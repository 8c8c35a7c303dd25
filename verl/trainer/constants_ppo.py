"""Variables that the processes of a user's own Ray job need (upstream: ``verl.trainer.constants_ppo``)."""

from __future__ import annotations

import os
from typing import Any

PPO_RAY_RUNTIME_ENV: dict[str, Any] = {
    "env_vars": {
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "VLLM_LOGGING_LEVEL": "WARN",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_CUMEM_ENABLE": "0",
    }
}


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """The ``runtime_env`` of ``ray.init``: the variables above that this process has not set itself.

    Ray passes a process's own variables on, so those win.
    """
    variables = PPO_RAY_RUNTIME_ENV["env_vars"]
    return {"env_vars": {name: value for name, value in variables.items() if name not in os.environ}}
