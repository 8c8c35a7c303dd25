"""Command: a GGUF file to a Hugging Face directory, which both engines and transformers load."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from hf_formats.config import GENERATION_CONFIG, parse_hf_config
from hf_formats.files import write_json
from hf_formats.problems import raise_problems
from mindspeed_llm.cli_io import progress, run_cli, run_once
from mindspeed_llm.gguf_form.config import hf_config
from mindspeed_llm.gguf_form.file import open_gguf, type_problems
from mindspeed_llm.gguf_form.tensors import plain_dtype, read_tensors, tensor_problems
from mindspeed_llm.gguf_form.tokenizer import end_tokens, make_tokenizer, tokenizer_config
from mindspeed_llm.hf_checkpoint import ShardedWriter
from mindspeed_llm.hf_shapes import hf_bytes


def convert_gguf(gguf: Path, output_dir: Path) -> None:
    """Make ``output_dir``: weights in bf16 (fp32 from a file that has nothing else), tokenizer and chat template.

    It appears whole or not at all; what is there from the same file is kept, what another command made is refused.
    ValueError: the ``gguf`` package is missing, or the file's architecture, keys, tensors, types or pre-tokenizer are
    not supported, by their names, before a weight is read.
    """
    run_once(output_dir, "convert_gguf", {}, [gguf], partial(_write, gguf))


def _write(gguf: Path, directory: Path) -> None:
    file = open_gguf(gguf)
    config = hf_config(file) | {"torch_dtype": str(plain_dtype(file)).removeprefix("torch.")}
    config |= {key: file.keys.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
    hf = parse_hf_config(config, str(gguf))
    raise_problems(str(gguf), type_problems(file) + tensor_problems(file, hf))
    make_tokenizer(file.keys).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config(file.keys, hf.max_position_embeddings))
    write_json(directory / GENERATION_CONFIG, {"eos_token_id": end_tokens(file.keys)})
    write_json(directory / "config.json", config)
    with progress(f"converting {gguf.name}", hf_bytes(hf)) as advance, ShardedWriter(directory) as writer:
        for name, tensor in read_tensors(file, hf):
            writer.add(name, tensor)
            advance(tensor.nbytes)
        writer.finish()


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.convert_gguf``."""
    parser = argparse.ArgumentParser("convert_gguf", description=__doc__)
    parser.add_argument("gguf", type=Path, metavar="FILE.gguf")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory to make")
    return run_cli(parser, lambda given: convert_gguf(given.gguf, given.to), argv)


if __name__ == "__main__":
    raise SystemExit(main())
