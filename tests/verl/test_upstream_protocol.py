"""Upstream's batches: `from verl import DataProto`, every method's signature, and results worked out by hand."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from tests.verl.upstream_api import module_differences
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor


def three_rows() -> DataProto:
    return DataProto.from_dict(
        {"obs": torch.tensor([[1, 2], [3, 4], [5, 6]])}, {"labels": ["a", "b", "c"]}, {"info": "test"}
    )


# What only a fork of the trainer or of the workers calls; plug-ins do not.
FOR_FORKS = (
    *("from_tensordict", "get_data_info", "load_from_disk", "make_iterator", "padding", "print_size", "save_to_disk"),
    *("sample_level_repeat", "to_tensordict", "unfold_column_chunks"),
    "from_dict: parameters",  # without num_batch_dims
)


def test_signatures_are_upstreams() -> None:
    found = module_differences(
        "verl.protocol",
        *("DataProto", "DataProtoItem", "pad_dataproto_to_divisor", "unpad_dataproto"),
        "list_of_dict_to_dict_of_list",
    )
    assert [text for text in found if not any(name in text for name in FOR_FORKS)] == []


def test_importing_verl_imports_nothing_heavy() -> None:
    check = "import sys, verl; assert 'torch' not in sys.modules; from verl import DataProto; print(len(DataProto()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr


def test_padding_enabled_lets_the_last_part_be_shorter() -> None:
    data = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    assert [part.batch["x"].tolist() for part in data.chunk(2)] == [[0, 1, 2], [3, 4]]
    plain = DataProto.from_dict({"x": torch.arange(5)})
    assert not plain.is_padding_enabled()
    with pytest.raises(AssertionError, match="does not split into 2 equal chunks"):
        plain.chunk(2)


def test_metrics_that_are_lists_are_joined_by_concat() -> None:
    parts = [
        DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"metrics": [{"loss": loss, "kl": 0.0}]})
        for loss in (1.0, 2.0)
    ]
    assert DataProto.concat(parts).meta_info["metrics"] == {"loss": [1.0, 2.0], "kl": [0.0, 0.0]}
    plain = [DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"metrics": {"loss": loss}}) for loss in (1.0, 2.0)]
    assert DataProto.concat(plain).meta_info["metrics"] == {"loss": [1.0, 2.0]}


def test_settings_of_the_parts_are_merged_by_concat() -> None:
    settings: list[dict] = [{"name": "A", "same": 1}, {"size": 32, "same": 1}, {"same": 2}]
    parts = [DataProto.from_dict({"x": torch.zeros(1)}, meta_info=given) for given in settings]
    assert DataProto.concat(parts[:2]).meta_info == {"name": "A", "size": 32, "same": 1}
    with pytest.raises(AssertionError, match="'same'.*1 and 2"):
        DataProto.concat(parts)


def test_a_batch_whose_columns_are_all_taken_keeps_its_rows() -> None:
    data = DataProto.from_dict({"x": torch.arange(3)})
    popped = data.pop(["x"])
    assert len(popped) == len(data) == 3 and len(pickle.loads(pickle.dumps(data))) == 3
    assert len(DataProto.from_dict({"x": torch.arange(3)}).select([])) == 3
    assert data.union(popped).batch["x"].tolist() == [0, 1, 2]
    assert len(DataProto(batch=None, non_tensor_batch=None, meta_info={"info": "test"})) == 0  # type: ignore[arg-type]


def test_an_empty_batch_needs_no_padding_and_names_are_no_rows() -> None:
    empty = DataProto.from_dict({"x": torch.zeros(0, 2)})
    assert pad_dataproto_to_divisor(empty, 4) == (empty, 0)
    with pytest.raises(TypeError, match="got a str"):
        empty["x"]


def test_a_deep_copy_of_columns_is_independent() -> None:
    data = three_rows()
    data.select(["obs"], deepcopy=True).batch["obs"][0, 0] = 9
    assert data.batch["obs"][0, 0] == 1
    data.select(["obs"]).batch["obs"][0, 0] = 9
    assert data.batch["obs"][0, 0] == 9
