"""The rollout engine: continuous batching over a paged latent cache, under vLLM's public names."""

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineArgs", "RequestOutput", "SamplingParams", "TokensPrompt"]
