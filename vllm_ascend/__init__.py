"""The rollout engine's platform and ops on Ascend, behind the contracts of vllm."""
