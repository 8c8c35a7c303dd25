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

TINY_MODEL = Path(__file__).with_name("tiny_model")
# Every part of DeepSeek-V3, as small as possible: 0.8 million parameters. Weights start with a width of
# 1 / sqrt(hidden_size): with DeepSeek's 0.006 so narrow a model learns very slowly.
HF_CONFIG: dict[str, Any] = json.loads((TINY_MODEL / "config.json").read_text(encoding="utf-8"))
NUM_SHARDS = 4


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
        from mindspeed_llm.fp8_quantize import quantize_checkpoint
        from recipes.common.warmup import Warmup, run_warmup

        rows = training_rows(train_parquet)
        texts = [message["content"] for row in rows for message in row["prompt"]]
        texts += [example.response for example in islice(examples(rows, seed, style), len(rows))]
        with tempfile.TemporaryDirectory(prefix="base_model_") as scratch:
            plain, bf16 = Path(scratch) / "plain", Path(scratch) / "bf16"
            write_text_atomically(plain / "config.json", json.dumps(HF_CONFIG, indent=2) + "\n")
            positions = HF_CONFIG["max_position_embeddings"]
            write_tokenizer(texts, plain, HF_CONFIG["vocab_size"], positions, style.whole_tokens)
            run_warmup(Warmup(plain, train_parquet, style, bf16, **settings))
            quantize_checkpoint(bf16, building, num_shards=NUM_SHARDS, num_mtp_layers=1)

    arguments = {**settings, "config": HF_CONFIG, "corpus": corpus_settings(style)}
    return run_once(output_dir, "make_base_model", arguments, [train_parquet], build)


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
        options = dict(vars(args))
        is_new = make_base_model(load_recipe(options.pop("recipe")).corpus, **options)
        say(f"base model {'written to' if is_new else 'is complete; nothing to do:'} {args.output_dir}")

    return run_cli(parser, body, argv)


if __name__ == "__main__":
    raise SystemExit(main())
