"""The rollout engine: continuous batching over a paged latent cache, under vLLM's public names."""

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.inputs import PromptType, TextPrompt, TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

__version__ = "0.9.1"  # the version of vLLM whose interface this is

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]
