"""Tokenizers are loaded from their files alone; one that needs its owner's code is refused with what to do instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, normalizers

from hf_formats.tokenizer import load_tokenizer, tokenizer_problem
from recipes.r1_zero.json_to_parquet import Problem, prompt_lengths
from tests.hf_formats.own_code import SPECIAL, TOKENS, write_own_code_tokenizer
from tests.mindspeed_llm.tiny import tiny_hf_config
from tests.real_tokenizers import KINDS, TEXTS
from tests.vllm.serving import write_served_checkpoint
from tools.doctor import host
from tools.doctor.__main__ import examine
from tools.doctor.finding import Options
from tools.launch.checks import model_problems
from verl.utils.tokenizer import hf_tokenizer
from vllm import LLM
from vllm.entrypoints.openai.api_server import main as serve
from vllm.transformers_utils.tokenizer import get_tokenizer

ADVICE = "put the same tokenizer there in the fast form, as tokenizer.json: docs/models.md says how to make it"


def test_code_of_its_own_is_refused_everywhere_and_never_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = write_own_code_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask whether to execute it
    needs = re.escape(
        f"{tmp_path} has no tokenizer.json, and its tokenizer (tiktoken.model, tokenization_moonshot.py) "
    )
    for load in (
        load_tokenizer,
        hf_tokenizer,
        get_tokenizer,
        LLM,
        lambda path: hf_tokenizer(path, trust_remote_code=True),
        lambda path: prompt_lengths([Problem(0, "x", "1", "")], path),
    ):
        with pytest.raises(ValueError, match=f"{needs}needs code of its own.*{ADVICE}"):
            load(str(tmp_path))
    assert serve([str(tmp_path), "--port", "0"]) == 2
    assert ADVICE in capsys.readouterr().err
    [of_launcher] = model_problems(tmp_path)
    options = Options(tmp_path, (), None, None, model_path=str(tmp_path))
    [of_doctor] = [finding for finding in examine(options) if finding.name == "tokenizer"]
    assert ADVICE in of_launcher and of_launcher.startswith("MODEL_PATH: ")
    assert ADVICE in of_doctor.remedy and of_doctor.is_fatal
    assert not code.was_executed()


@pytest.mark.filterwarnings("ignore:the tokenizer has no pad token")
def test_a_fast_file_beside_the_code_is_what_counts(tmp_path: Path) -> None:
    write_served_checkpoint(tmp_path)
    fast, plain = (tmp_path / "tokenizer.json").read_bytes(), load_tokenizer(str(tmp_path))
    code = write_own_code_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(fast)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"added_tokens_decoder": {}}
    for named in ("TikTokenTokenizer", "LlamaTokenizerFast", None):
        settings = config | {"tokenizer_class": named, "bos_token": "<bos>", "eos_token": "<eos>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        for load in (load_tokenizer, hf_tokenizer, get_tokenizer):
            tokenizer = load(str(tmp_path))
            assert tokenizer.encode("hello 世") == plain.encode("hello 世") and tokenizer.eos_token_id == 1
    assert model_problems(tmp_path) == [] and not code.was_executed()
    [found] = host.tokenizer(str(tmp_path))
    assert not found.remedy


@pytest.mark.parametrize(("kind", "named"), [("llama2", "LlamaTokenizer"), ("llama3", "LlamaTokenizerFast")])
def test_text_is_cut_as_the_fast_file_says_whatever_class_is_named(tmp_path: Path, kind: str, named: str) -> None:
    KINDS[kind].write(tmp_path)
    config, file = tmp_path / "tokenizer_config.json", tmp_path / "tokenizer.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": named}))
    written = Tokenizer.from_file(str(file))
    if kind == "llama2":  # Yi's: no space before the first word
        written.pre_tokenizer, written.normalizer = None, normalizers.Replace(" ", "▁")
        written.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        written.save(str(file))
    loaded = load_tokenizer(str(tmp_path))
    for text in (*TEXTS, "It's 12345\n\n  and 67."):
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert ids == Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
        assert loaded.decode(ids, clean_up_tokenization_spaces=False) == text


def test_every_folder_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    for name, text, problem in (
        (None, "", "has no tokenizer (tokenizer.json, tokenizer_config.json): copy those of the model there"),
        ("tokenizer_config.json", "{}", "has no tokenizer (tokenizer.json, tokenizer_config.json): copy"),
        ("qwen.tiktoken", "AA== 0", f"(qwen.tiktoken) needs code of its own, which is never executed; {ADVICE}"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read: "),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        if name is not None:
            (folder / name).write_text(text)
        assert problem in str(tokenizer_problem(folder))
        with pytest.raises(ValueError, match=re.escape(problem)):
            load_tokenizer(str(folder))
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "vocab.json").write_text('{"a": 0}')
    (slow / "merges.txt").write_text("#version: 0.2\n")
    (slow / "tokenizer_config.json").write_text('{"tokenizer_class": "TheirTokenizer"}')
    assert tokenizer_problem(slow) is None, "transformers may have the class"
    with pytest.raises(ValueError, match=f"cannot be loaded.*{ADVICE}"):
        load_tokenizer(str(slow))


def test_the_files_are_checked_without_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hf_formats.tokenizer import tokenizer_problem\n"
        f"print(bool(tokenizer_problem(Path({str(tmp_path)!r}))), 'transformers' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.split() == ["True", "False"]


@pytest.mark.slow
def test_the_page_makes_the_fast_form(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    code = write_own_code_tokenizer(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("## A tokenizer with code of its own")[2].partition("\n## ")[0]
    lines = re.findall(r"^    (.*)$", section, re.MULTILINE)
    program = "\n".join(lines).replace("/models/Moonlight-16B-A3B", str(tmp_path))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert not code.was_executed()
    tokenizer = load_tokenizer(str(tmp_path))
    pattern = re.search(r'pattern = r"(.*)"', program)
    assert pattern is not None
    ranks, special = {token: rank for rank, token in enumerate(TOKENS)}, {text: one for one, text in SPECIAL.items()}
    own = tiktoken.Encoding("own", pat_str=pattern.group(1), mergeable_ranks=ranks, special_tokens=special)
    for text in ("hello world", "[BOS]hello 12345 wor\n\n 世界 🙂<|im_end|> x", "don't  stop", ""):
        assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text, allowed_special="all")
        assert tokenizer.decode(own.encode(text, allowed_special="all"), clean_up_tokenization_spaces=False) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (len(TOKENS), len(TOKENS) + 1)
