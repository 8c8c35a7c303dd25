"""Command: the tiny DeepSeek-V3 to start from, warmed up by our training engine and written as DeepSeek publishes."""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed_llm.cli_io import run_cli, run_once, say
from recipes.common.atomic_files import write_text_atomically
from recipes.common.corpus import CorpusStyle, corpus_settings, examples, training_rows
from recipes.common.recipe import load_recipe, recipe_names
from recipes.common.tokenizer import write_tokenizer

MAX_POSITIONS = 4096
VOCAB_SIZE = 512
NUM_SHARDS = 4
# Every part of DeepSeek-V3, as small as possible: 0.8 million parameters.
HF_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "ep_size": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,  # 1 / sqrt(hidden_size): with DeepSeek's 0.006 so narrow a model learns very slowly
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def make_base_model(
    style: CorpusStyle,
    train_parquet: Path,
    output_dir: Path,
    seed: int,
    num_steps: int,
    batch_size: int,
    num_processes: int,
) -> bool:
    """Make the model in ``output_dir``; False when it is there already from the same rows and settings."""
    if not train_parquet.is_file():
        raise ValueError(f"--train-parquet {train_parquet}: no such file; make it with the recipe's data script")
    if num_steps < 1 or num_processes < 1 or batch_size < num_processes:
        raise ValueError(
            f"--num-steps {num_steps}, --batch-size {batch_size}, --num-processes {num_processes}: expected at least 1 "
            "each, and a text for every process"
        )
    settings = {"seed": seed, "num_steps": num_steps, "batch_size": batch_size, "num_processes": num_processes}

    def build(building: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="base_model_") as scratch:
            _build(style, train_parquet, Path(scratch), building, settings)

    arguments = {**settings, "config": HF_CONFIG, "corpus": corpus_settings(style)}
    return run_once(output_dir, "make_base_model", arguments, [train_parquet], build)


def _build(style: CorpusStyle, train_parquet: Path, scratch: Path, building: Path, settings: dict[str, int]) -> None:
    from mindspeed_llm.fp8_quantize import quantize_checkpoint
    from recipes.common.warmup import Warmup, run_warmup

    plain = scratch / "plain"
    write_text_atomically(plain / "config.json", json.dumps(HF_CONFIG, indent=2) + "\n")
    rows = training_rows(train_parquet)
    texts = [message["content"] for row in rows for message in row["prompt"]]
    texts += [example.response for example in islice(examples(rows, settings["seed"], style), len(rows))]
    write_tokenizer(texts, plain, VOCAB_SIZE, MAX_POSITIONS, style.whole_tokens)
    bf16 = scratch / "bf16"
    run_warmup(Warmup(plain, train_parquet, style, bf16, **settings))
    quantize_checkpoint(bf16, building, num_shards=NUM_SHARDS, num_mtp_layers=1)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m recipes.common.base_model RECIPE``."""
    parser = argparse.ArgumentParser(prog="python -m recipes.common.base_model", description=__doc__)
    parser.add_argument("recipe", choices=recipe_names(), help="whose corpus it reads")
    parser.add_argument("--train-parquet", type=Path, required=True, help="train.parquet of the recipe's data script")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--num-steps", type=int, default=350, help="optimizer steps of the warm-up")
    parser.add_argument("--batch-size", type=int, default=128, help="texts per step, at most")
    parser.add_argument("--num-processes", type=int, default=2, help="data-parallel processes; part of the result")

    def body(args: argparse.Namespace) -> None:
        is_new = make_base_model(
            load_recipe(args.recipe).corpus,
            args.train_parquet,
            args.output_dir,
            args.seed,
            args.num_steps,
            args.batch_size,
            args.num_processes,
        )
        say(f"base model {'written to' if is_new else 'is complete; nothing to do:'} {args.output_dir}")

    return run_cli(parser, body, argv)


if __name__ == "__main__":
    raise SystemExit(main())
