"""A GGUF file of each kind and architecture becomes the folder that it was written from, and the rest is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from hf_formats.config import load_hf_config, parse_hf_config
from hf_formats.tokenizer import load_tokenizer
from mindspeed_llm.convert_gguf import convert_gguf, main
from mindspeed_llm.gguf_form import file as gguf_file
from mindspeed_llm.gguf_form.file import open_gguf
from mindspeed_llm.gguf_form.tokenizer import make_tokenizer
from mindspeed_llm.hf_checkpoint import open_hf
from tests.mindspeed_llm.gguf_side import ARCHITECTURES, TEMPLATE, add_tokenizer, add_tokens, finish, gguf, write_gguf
from tests.mindspeed_llm.tiny import tiny_decoder_config
from tests.published import readers, smollm2, smollm2_gguf
from tests.real_tokenizers import KINDS, PUBLISHED, TEXTS
from tests.tiny_models import CONFIGS

MODELS = {
    name: config
    for name, config in CONFIGS.items()
    if config["model_type"] in ARCHITECTURES and name != "qwen3-moe, weights as they are"  # no key says it
}
LATENT = [name for name, config in MODELS.items() if "kv_lora_rank" in config]
KINDS_OF_WEIGHTS = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
# What tokenizers cut in different ways.
MORE_TEXTS = (
    "12345 67 8,900.5 + 1e10 = ٣٤٥",
    "  two  spaces\t\ttabs\n\n\nlines \r\n end  ",
    "I'LL we've `code_x` [0]!? ...(a)",
    "<think>why</think> ok",
    "cafe\u0301",
)
READ_BY_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, *names = sys.argv[1:]
ids = torch.arange(3, 35).view(1, -1)
texts = torch.load(f"{folder}/texts.pt")
found = {}
for name in names:
    dtype = torch.float32 if "F32" in name else torch.bfloat16
    logits = []
    for arguments in ((folder, {"gguf_file": f"{name}.gguf"}), (f"{folder}/{name}", {})):
        model = AutoModelForCausalLM.from_pretrained(arguments[0], dtype=dtype, **arguments[1]).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file=f"{name}.gguf")
    found[name] = (*logits, [theirs(text, add_special_tokens=False)["input_ids"] for text in texts])
torch.save(found, f"{folder}/found.pt")
"""


@pytest.mark.parametrize("name", MODELS)
def test_config_and_tensors_are_those_of_the_folder_it_was_written_from(name: str, tmp_path: Path) -> None:
    check_fp32(tmp_path, MODELS[name])


@pytest.mark.parametrize("name", LATENT)
def test_deepseek_with_keys_and_values_apart(name: str, tmp_path: Path) -> None:
    check_fp32(tmp_path, MODELS[name], is_divided=True)


def test_groups_that_the_file_does_not_have_are_the_published_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published = {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 8}
    check_fp32(tmp_path, MODELS["deepseek-v3"] | published)
    assert "taken as published: 8 groups, best 4" in caplog.text


def check_fp32(folder: Path, config: dict[str, Any], is_divided: bool = False) -> None:
    held = write_gguf(folder / "model.gguf", config, is_divided=is_divided)
    convert_gguf(folder / "model.gguf", folder / "out")
    found, expected = load_hf_config(folder / "out"), parse_hf_config(config)
    # What a file does not say, and what only training asks for.
    unsaid = ("eos_token_ids", "aux_loss_alpha", "initializer_range")
    assert replace(found, **{key: getattr(expected, key) for key in unsaid}) == expected
    check_tensors(folder / "out", held, torch.float32)


def check_tensors(folder: Path, held: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    with open_hf(folder, load_hf_config(folder)) as checkpoint:
        assert set(checkpoint.names()) == set(held)
        for name, values in held.items():
            kept = torch.float32 if name.endswith("correction_bias") else dtype
            assert checkpoint.dtype(name) == kept
            assert torch.equal(checkpoint.read(name), values.to(kept)), name


@pytest.mark.parametrize("kind", KINDS_OF_WEIGHTS)
def test_every_kind_of_weights_is_dequantised(kind: str, tmp_path: Path) -> None:
    held = write_gguf(tmp_path / "model.gguf", tiny_decoder_config(**LLAMA, **WIDE), kind)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    check_tensors(tmp_path / "out", held, torch.float32 if kind == "F32" else torch.bfloat16)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_stacks_of_quantised_experts_are_divided(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that a tensor is dequantised a few rows at a time."""
    monkeypatch.setattr(gguf_file, "_CHUNK_VALUES", 100)
    config = MODELS[name] | {"kv_lora_rank": 32} if name in LATENT else MODELS[name] | {"head_dim": 32}
    held = write_gguf(tmp_path / "model.gguf", config, "Q8_0")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    check_tensors(tmp_path / "out", held, torch.bfloat16)


@pytest.mark.parametrize(
    "name", ["qwen", "llama3", "llama2", *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED)]
)
def test_text_becomes_the_same_tokens(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    kind.write(tmp_path / "made", ("<think>", "</think>") if name not in PUBLISHED else ())
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    add_tokenizer(writer, name, tmp_path / "made")
    finish(writer)
    found, expected = made_tokenizer(tmp_path), Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    texts = [*TEXTS, *MORE_TEXTS, kind.turn.format("Why?")]
    if (
        name == "llama2"
    ):  # Llama 2's own puts a space before all texts, behind whole tokens too, that of tests before words
        texts = [text.strip() for text in texts if not text.startswith("<")]
    for text in texts:
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids) == expected.decode(ids)
    [*begin, _] = found.encode("x").ids
    assert begin[:1] == ([] if kind.bos is None else [expected.token_to_id(kind.bos)])


def made_tokenizer(folder: Path) -> Tokenizer:
    return make_tokenizer(open_gguf(folder / "vocabulary.gguf").keys)


def test_smollm_cuts_numbers_into_digits_and_gpt2_does_not(tmp_path: Path) -> None:
    tokens = [*"0123456789x", "Ġ", "12", "Ġ1", "Ġx", "[PAD]"]
    for pre, words in (("smollm", ["1", "2", "Ġ", "1", "Ġx"]), ("gpt-2", ["12", "Ġ1", "Ġx"])):
        writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
        add_tokens(writer, "gpt2", pre, tokens, [1] * (len(tokens) - 1) + [5], ["1 2", "Ġ 1", "Ġ x"])
        finish(writer)
        found = made_tokenizer(tmp_path)
        assert found.encode("12 1 x").tokens == words
        assert found.get_vocab_size() == len(tokens) - 1  # tokens that are not used are left out


def test_tokens_around_a_text_are_those_that_the_keys_ask_for(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    add_tokens(writer, "gpt2", "gpt-2", ["0", "1", "10", "<s>", "</s>"], [1, 1, 1, 3, 3])
    for number, add in ((3, writer.add_bos_token_id), (4, writer.add_eos_token_id)):
        add(number)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    finish(writer)
    assert made_tokenizer(tmp_path).encode("010").tokens == ["<s>", "0", "10", "</s>"]


def test_the_folder_has_template_and_end_tokens(tmp_path: Path) -> None:
    size = KINDS["llama3"].write(tmp_path / "made")
    config = tiny_decoder_config(**LLAMA, vocab_size=size, tie_word_embeddings=True)
    write_gguf(tmp_path / "model.gguf", config, "Q8_0", tokenizer=("llama3", tmp_path / "made"))
    assert main([str(tmp_path / "model.gguf"), "--to", str(tmp_path / "out")]) == 0
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin_of_text|>", "<|eot_id|>")
    hf = load_hf_config(tmp_path / "out")
    assert hf.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|eot_id|>"),) and hf.tie_word_embeddings
    made = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == made  # nothing is made twice


def other_architecture(file: Path) -> None:
    finish(gguf.GGUFWriter(file, "mamba"))


def one_of_two(file: Path) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint16("split.count", 2)
    finish(writer)


def other_pre_tokenizer(file: Path) -> None:
    write_gguf(file, tiny_decoder_config(**LLAMA))
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"gpt-9"))


def other_merges(file: Path) -> None:
    write_gguf(file, tiny_decoder_config(**LLAMA))
    file.write_bytes(file.read_bytes().replace(b"\3\0\0\0\0\0\0\x001 0", b"\3\0\0\0\0\0\0\x001 z"))


def other_tensor(file: Path) -> None:
    write_gguf(file, tiny_decoder_config(**LLAMA))
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_v.weight", b"blk.1.attn_w.weight"))


def other_shape(file: Path) -> None:
    write_gguf(file, MODELS["qwen3"], **{"attention.key_length": 32})


def truncated(file: Path) -> None:
    write_gguf(file, tiny_decoder_config(**LLAMA))
    file.write_bytes(file.read_bytes()[:-1000])


def integers(file: Path) -> None:
    write_gguf(file, tiny_decoder_config(**LLAMA), "I8")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "architecture": (other_architecture, "architecture 'mamba' is not supported; supported: llama, "),
    "pre-tokenizer": (other_pre_tokenizer, "tokenizer.ggml.pre is 'gpt-9'; supported pre-tokenizers: "),
    "merges": (other_merges, "tokens and merges do not make a tokenizer: "),
    "tensor": (other_tensor, "blk.1.attn_w.weight is not part of the model"),
    "missing tensor": (other_tensor, "blk.1.attn_v.weight is missing"),
    "shape": (other_shape, r"blk.0.attn_q.weight has shape \(96, 64\); the file's keys make it \(128, 64\)"),
    "key": (
        lambda file: write_gguf(file, tiny_decoder_config(**LLAMA), **{"attention.sliding_window": 9}),
        r"llama.attention.sliding_window \(it is 9\) is not known",
    ),
    "scaling": (
        lambda file: write_gguf(file, tiny_decoder_config(**LLAMA), **{"rope.scaling.type": "linear"}),
        "rope_scaling type is 'linear'",
    ),
    "positions": (
        lambda file: write_gguf(file, tiny_decoder_config(**LLAMA), **{"rope.dimension_count": 8}),
        "positions turn 8 of a head's 16 channels",
    ),
    "type": (integers, "type I8 cannot be dequantised"),
    "no GGUF": (lambda file: file.write_bytes(b"PK\3\4" * 20), "cannot be read as GGUF"),
    "part": (one_of_two, "one part of several"),
    "truncated": (truncated, "cannot be read as GGUF"),
    "nothing": (lambda file: None, "model.gguf"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_known_is_refused_by_its_name(what: str, tmp_path: Path) -> None:
    write, message = REFUSED[what]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "model.gguf")
    with pytest.raises((ValueError, OSError), match=message):
        convert_gguf(tmp_path / "in" / "model.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf==") as raised:
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    pinned = next(word for word in str(raised.value).split() if word.startswith("gguf=="))
    pins = Path(__file__).parents[2] / "requirements" / "base.txt"
    assert pinned in pins.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_transformers_reads_the_file_as_it_reads_the_folder(tmp_path: Path) -> None:
    """Every kind of weights, every architecture that transformers reads; in another process, which has accelerate."""
    path = readers()
    size = KINDS["qwen"].write(tmp_path / "made")
    tokenizer = ("qwen", tmp_path / "made")
    models = {"llama": LLAMA, "qwen2": MODELS["qwen2"], "qwen3": MODELS["qwen3"], "qwen3-moe": MODELS["qwen3-moe"]}
    sizes = {"qwen3": {"head_dim": 128}, "qwen3-moe": {"head_dim": 64}}  # those that transformers has without the key
    sizes["qwen3-moe"]["moe_intermediate_size"] = 768
    names = [
        (name, kind) for name in models for kind in (KINDS_OF_WEIGHTS if name == "llama" else ("F32", "Q4_0", "Q6_K"))
    ]
    for name, kind in names:
        config = tiny_decoder_config(**{**models[name], **WIDE, "vocab_size": size, **sizes.get(name, {})})
        write_gguf(tmp_path / f"{name}-{kind}.gguf", config, kind, tokenizer=tokenizer)
        convert_gguf(tmp_path / f"{name}-{kind}.gguf", tmp_path / f"{name}-{kind}")
    torch.save(TEXTS, tmp_path / "texts.pt")
    files = [f"{name}-{kind}" for name, kind in names]
    command = [sys.executable, "-c", READ_BY_TRANSFORMERS, str(tmp_path), *files]
    variables = {"PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    for file, (theirs, ours, ids) in torch.load(tmp_path / "found.pt").items():
        assert torch.isfinite(ours).all() and torch.equal(theirs, ours), file
        made = load_tokenizer(str(tmp_path / file))
        assert [made(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == ids, file


@pytest.mark.slow
def test_a_published_model_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    convert_gguf(smollm2_gguf(), tmp_path / "out")
    with open_hf(smollm2(), load_hf_config(smollm2())) as theirs:
        check_tensors(tmp_path / "out", {name: theirs.read(name) for name in theirs.names()}, torch.bfloat16)
    ours, expected = load_tokenizer(str(tmp_path / "out")), load_tokenizer(str(smollm2()))
    for text in (
        *TEXTS,
        *MORE_TEXTS[1:],
    ):  # transformers does not cut Arabic digits apart, the published tokenizer does
        assert ours(text)["input_ids"] == expected(text)["input_ids"], text
    asked = ours.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
