"""The decoder-only language model."""

from megatron.core.models.gpt.gpt_model import GPTModel, ModelChunks, make_gpt_model, model_chunks

__all__ = ["GPTModel", "ModelChunks", "make_gpt_model", "model_chunks"]
