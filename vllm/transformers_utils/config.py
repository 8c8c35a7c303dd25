"""The models that the engine runs: config.json's dimensions, and what they mean for caches and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from hf_formats.config import HFModelConfig, load_hf_config, read_config_dict
from hf_formats.fp8 import quantization_problems
from hf_formats.problems import raise_problems

TOPK_METHODS = {"sigmoid": ("noaux_tc",), "softmax": ("greedy", "group_limited_greedy")}


@dataclass(frozen=True)
class HFConfig(HFModelConfig):
    """A model's dimensions, and what they mean for this engine's caches and tensor parallelism.

    scoring_func "sigmoid": a correction bias steers the choice of experts, a group counts as its two best experts;
    "softmax": no bias, a group counts as its best expert.
    """

    def kv_heads_of_rank(self, tp: int) -> int:
        """Return the heads of keys and values on a TP rank; with more ranks than heads, ranks share them."""
        return max(1, self.num_key_value_heads // tp)

    def kv_values_per_token(self, tp: int) -> int:
        """Return the values that one layer of a TP rank keeps of a token; every rank has the whole latent."""
        if self.is_mla:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.kv_heads_of_rank(tp) * self.head_dim

    def tp_problems(self, tp: int) -> list[str]:
        """Return why the model cannot be split over `tp` ranks."""
        # Shared experts are split, and routed ones without expert parallelism.
        names = ("num_attention_heads", "vocab_size", "intermediate_size", "moe_intermediate_size")
        sizes = {name: getattr(self, name) for name in names}
        problems = [
            f"{name}={size} does not divide by tensor_parallel_size={tp}" for name, size in sizes.items() if size % tp
        ]
        heads = self.num_key_value_heads
        if heads % tp and tp % heads:
            problems.append(f"num_key_value_heads={heads} neither divides by tensor_parallel_size={tp} nor divides it")
        return problems


def load_config(model_dir: str) -> HFConfig:
    """Read `model_dir`/config.json; ValueError lists every key that is missing or that this engine cannot honour."""
    hf = load_hf_config(model_dir)
    raise_problems(f"{model_dir}/config.json", _engine_problems(hf))
    return HFConfig(**vars(hf))


def _engine_problems(hf: HFModelConfig) -> list[str]:
    """Return what the training engine can do with such a model and this engine cannot."""
    if not hf.n_routed_experts or hf.topk_method in TOPK_METHODS[hf.scoring_func]:
        return []
    known = " or ".join(f"{name} with {'/'.join(methods)}" for name, methods in TOPK_METHODS.items())
    return [f"scoring_func={hf.scoring_func!r} with topk_method={hf.topk_method!r} is not supported, expected {known}"]


FP8, DEQUANTIZE = "fp8", "dequantize"
QUANTIZATIONS = (FP8, DEQUANTIZE)


def resolve_quantization(model_dir: str, requested: str | None) -> tuple[list[str], str | None]:
    """Return (problems, "fp8" when weights are held in FP8 blocks or None when in the model's dtype).

    requested: "fp8" quantises weights that arrive in another form, "dequantize" converts FP8 weights as they arrive,
    None keeps the checkpoint's form.
    """
    config = read_config_dict(model_dir)
    problems = quantization_problems(config)
    if requested is not None and requested not in QUANTIZATIONS:
        problems.append(
            f"quantization={requested!r} is unknown, expected one of {', '.join(QUANTIZATIONS)}, or leave it out to "
            "hold weights as the checkpoint stores them"
        )
    is_fp8 = requested == FP8 or (requested is None and bool(config.get("quantization_config")))
    return problems, FP8 if is_fp8 else None
