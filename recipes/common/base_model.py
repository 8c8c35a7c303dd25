"""Command: the tiny model to start from, warmed up by our training engine and written as its family is published."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from itertools import islice
from pathlib import Path

from mindspeed_llm.cli_io import run_cli, run_once, say
from recipes.common.corpus import CorpusStyle, corpus_settings, examples, training_rows
from recipes.common.options import DataScriptParser, user_path
from recipes.common.recipe import load_recipe, recipe_names
from recipes.common.tiny_models import DEEPSEEK_V3, TinyModel
from recipes.common.tokenizer import write_tokenizer

NUM_SHARDS = 4


def make_base_model(
    style: CorpusStyle,
    train_parquet: Path,
    output_dir: Path,
    seed: int,
    num_steps: int,
    batch_size: int,
    num_processes: int,
    tiny: TinyModel = DEEPSEEK_V3,
) -> bool:
    """Make ``tiny`` with weights in ``output_dir``; False when it is there already from the same rows and settings."""
    if not train_parquet.is_file():
        raise ValueError(f"--train-parquet {train_parquet}: no such file; make it with the recipe's data script")
    if num_steps < 1 or num_processes < 1 or batch_size < num_processes:
        raise ValueError(
            f"--num-steps {num_steps}, --batch-size {batch_size}, --num-processes {num_processes}: expected at least 1 "
            "each, and a text for every process"
        )
    config = tiny.config
    settings = {"seed": seed, "num_steps": num_steps, "batch_size": batch_size, "num_processes": num_processes}

    def build(building: Path) -> None:
        from mindspeed_llm.fp8_quantize import quantize_checkpoint
        from recipes.common.warmup import Warmup, run_warmup

        rows = training_rows(train_parquet)
        texts = [message["content"] for row in rows for message in row["prompt"]]
        texts += [example.response for example in islice(examples(rows, seed, style), len(rows))]
        with tempfile.TemporaryDirectory(prefix="base_model_") as scratch:
            plain, bf16 = Path(scratch) / "plain", Path(scratch) / "bf16"
            shutil.copytree(tiny.directory, plain)
            write_tokenizer(
                texts, plain, config["vocab_size"], config["max_position_embeddings"], style.whole_tokens, tiny.chat
            )
            run_warmup(Warmup(plain, train_parquet, style, bf16, **settings, chat=tiny.chat))
            if tiny.is_fp8:
                quantize_checkpoint(bf16, building, num_shards=NUM_SHARDS, num_mtp_layers=1)
            else:
                shutil.copytree(bf16, building, dirs_exist_ok=True)

    arguments = {**settings, "config": config, "corpus": corpus_settings(style)}
    return run_once(output_dir, "make_base_model", arguments, [train_parquet], build)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m recipes.common.base_model RECIPE``."""
    parser = DataScriptParser(__doc__, prog="python -m recipes.common.base_model")
    parser.add_argument("recipe", choices=recipe_names(), help="whose corpus it reads")
    parser.add_argument(
        "--train_parquet", type=user_path, required=True, help="train.parquet of the recipe's data script"
    )
    parser.add_output("directory to make")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--num-steps", type=int, default=350, help="optimizer steps of the warm-up")
    parser.add_argument("--batch-size", type=int, default=128, help="texts per step, at most")
    parser.add_argument("--num-processes", type=int, default=2, help="data-parallel processes; part of the result")

    def body(args: argparse.Namespace) -> None:
        options = dict(vars(args))
        recipe = load_recipe(options.pop("recipe"))
        is_new = make_base_model(recipe.corpus, **options, tiny=recipe.tiny_model)
        say(f"base model {'written to' if is_new else 'is complete; nothing to do:'} {args.output_dir}")

    return run_cli(parser, body, argv)


if __name__ == "__main__":
    raise SystemExit(main())
