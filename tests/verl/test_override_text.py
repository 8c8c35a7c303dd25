"""Any text comes back from an override as it was: through Hydra's grammar, the composition and the typed tree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl.trainer.config import ConfigError, load_config
from verl.trainer.config.load import CONFIG_DIR, to_yaml
from verl.trainer.config.override_text import literal, override

HARD = st.sampled_from(list("\\'\"${}[](),:=#%~*?!&|;<> aé实/.\n\t@+-_0"))
TEXTS = st.lists(HARD | st.characters(exclude_categories=["Cs"]), max_size=12).map("".join)
NASTY = "/tmp/实验 b/josé's \\ \\' $x ${y} \\${z} {a:b}[1],c=d#%é\\"


@settings(max_examples=300)
@given(TEXTS)
def test_any_text_comes_back(text: str) -> None:
    parsed = OverridesParser.create().parse_override(override("a.b", text)).value()
    assert OmegaConf.to_container(OmegaConf.create({"a": parsed}), resolve=True) == {"a": text}
    nested = {"a": [text, {"b": text}], "n": 1}
    assert OmegaConf.to_container(OmegaConf.create(literal(nested)), resolve=True) == nested


def test_the_typed_tree_and_its_yaml_have_the_path_as_it_is() -> None:
    config = load_config([override("trainer.report_dir", NASTY), override("data.train_files", Path(NASTY))])
    assert (config.trainer.report_dir, config.data.train_files) == (NASTY, NASTY)
    again = OmegaConf.to_container(OmegaConf.create(yaml.safe_load(to_yaml(config))), resolve=True)
    assert isinstance(again, dict) and again["trainer"]["report_dir"] == NASTY


def test_a_home_and_a_config_folder_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", NASTY)
    config = load_config(["trainer.report_dir=~/run", "custom_reward_function.path=~/a.py"])
    assert config.trainer.report_dir == f"{NASTY}/run"
    folder = tmp_path / Path(NASTY).name
    folder.mkdir()
    shutil.copy(CONFIG_DIR / "base.yaml", folder / "mine.yaml")
    assert load_config(config_name="mine", config_dir=folder) == load_config()


def test_a_path_that_needs_quotes_is_refused_with_the_quoted_form() -> None:
    with pytest.raises(ConfigError, match=r"in a shell 'data\.train_files='\"'\"'/tmp/实验/a\.parquet'"):
        load_config(["data.train_files=/tmp/实验/a.parquet"])
