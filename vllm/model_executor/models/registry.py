"""Which class runs which architecture."""

from __future__ import annotations

from hf_formats.families import FAMILIES
from vllm.model_executor.models.causal_lm import CausalLM

MODELS: dict[str, type[CausalLM]] = {family.architecture: CausalLM for family in FAMILIES.values()}
