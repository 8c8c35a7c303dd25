"""What the server that forks the tests' processes imports once; whoever starts the server first decides for all.

`conftest.py` sets it before any test. None of these modules has side effects (threads, groups).
"""

PRELOADED = [
    "pytest",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "megatron.core.models.gpt.gpt_model",
    "vllm.entrypoints.llm",
    "verl.workers.megatron_workers",
    "verl.workers.separate_workers",
    # What Ray imports; Ray itself keeps the environment of its import, which must be a worker's own.
    "jsonschema",
    "requests",
]
