"""Upstream's batches: `from verl import DataProto`, every method's signature, and results worked out by hand."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.verl.upstream_api import module_differences
from verl import DataProto
from verl.protocol import (
    DataProtoConfig,
    pad_dataproto_to_divisor,
)


def three_rows() -> DataProto:
    return DataProto.from_dict(
        {"obs": torch.tensor([[1, 2], [3, 4], [5, 6]])}, {"labels": ["a", "b", "c"]}, {"info": "test"}
    )


def labels(data: DataProto) -> list[str]:
    return data.non_tensor_batch["labels"].tolist()


def test_signatures_are_upstreams() -> None:
    assert not module_differences(
        "verl.protocol",
        *("DataProto", "DataProtoItem", "pad_dataproto_to_divisor", "unpad_dataproto"),
        "list_of_dict_to_dict_of_list",
    )
    assert not module_differences(
        "verl.utils.tensordict_utils",
        *("assign_non_tensor_dict", "assign_non_tensor_data", "get_tensordict"),
    )


def test_importing_verl_imports_nothing_heavy() -> None:
    check = "import sys, verl; assert 'torch' not in sys.modules; from verl import DataProto; print(len(DataProto()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr


def test_several_batch_dimensions_only_for_tensors_that_share_them() -> None:
    tensors = {"obs": torch.zeros(6, 4), "act": torch.zeros(6, 4, 3)}
    assert DataProto.from_dict(tensors).batch.batch_size == torch.Size([6])
    two = DataProto.from_dict(tensors, num_batch_dims=2)
    assert two.batch.batch_size == torch.Size([6, 4])
    assert pickle.loads(pickle.dumps(two)).batch.batch_size == torch.Size([6, 4])
    for error in (AssertionError, ValueError):  # upstream's error and ours
        with pytest.raises(error, match="the first 3 dimensions"):
            DataProto.from_dict(tensors, num_batch_dims=3)


def test_repeating_rows_each_its_own_number_of_times() -> None:
    repeated = three_rows().sample_level_repeat([2, 0, 1])
    assert labels(repeated) == ["a", "a", "c"] and repeated.batch["obs"].tolist() == [[1, 2], [1, 2], [5, 6]]
    with pytest.raises(ValueError, match="repeat_times of shape"):
        three_rows().sample_level_repeat([1])


def test_columns_unfold_into_rows_and_the_others_repeat() -> None:
    data = DataProto.from_dict(
        {"a": torch.tensor([[1, 2], [3, 4]]), "b": torch.tensor([[5, 6], [7, 8]])},
        {"labels": ["x", "y"], "pairs": np.array([["p", "q"], ["r", "s"]], dtype=object)},
    ).unfold_column_chunks(2, split_keys=["a", "pairs"])
    assert data.batch["a"].tolist() == [[1], [2], [3], [4]]
    assert data.batch["b"].tolist() == [[5, 6], [5, 6], [7, 8], [7, 8]]
    assert labels(data) == ["x", "x", "y", "y"]
    assert data.non_tensor_batch["pairs"].tolist() == [["p"], ["q"], ["r"], ["s"]]


def test_the_iterator_covers_every_row_each_epoch_in_an_order_of_its_seed() -> None:
    data = DataProto.from_dict({"x": torch.arange(12)}, {"labels": [str(i) for i in range(12)]})
    shuffle = {"shuffle": True}
    drawn = [
        [batch.batch["x"].tolist() for batch in data.make_iterator(4, epochs=2, seed=seed, dataloader_kwargs=shuffle)]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 6
    for epoch in (drawn[0][:3], drawn[0][3:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(12))
    plain = list(data.make_iterator(6, epochs=1))
    assert plain[1].batch["x"].tolist() == [6, 7, 8, 9, 10, 11] and labels(plain[1])[0] == "6"
    with pytest.raises(AssertionError, match="does not divide"):
        data.make_iterator(5, epochs=1)


def test_padding_enabled_lets_the_last_part_be_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    assert [part.batch["x"].tolist() for part in data.chunk(2)] == [[0, 1, 2], [3, 4]]
    plain = DataProto.from_dict({"x": torch.arange(5)})
    assert not plain.is_padding_enabled() and not DataProtoConfig.auto_padding
    monkeypatch.setenv("VERL_AUTO_PADDING", "TRUE")
    assert plain.is_padding_enabled()
    monkeypatch.delenv("VERL_AUTO_PADDING")
    DataProtoConfig.auto_padding = True
    try:
        assert plain.is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    data.padding(2)
    assert data.batch["x"].tolist() == [0, 1, 2, 3, 4, 0, 0]
    data.padding(1, "last")
    assert data.batch["x"].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    with pytest.raises(AssertionError, match="does not split into 2 equal chunks"):
        DataProto.from_dict({"x": torch.arange(5)}).chunk(2)


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


def test_lists_of_a_row_are_cut_with_its_columns() -> None:
    data = DataProto.from_dict({"x": torch.arange(8).reshape(2, 4)}, {"labels": [["a1", "a2"], ["b1", "b2"]]})
    cut = data.unfold_column_chunks(2, ["x", "labels"])
    assert cut.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut.non_tensor_batch["labels"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"]]


def test_ragged_columns_are_pickled() -> None:
    ragged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    back = pickle.loads(pickle.dumps(DataProto(batch=TensorDict({"r": ragged}, batch_size=[2]))))
    assert back.batch["r"].layout == torch.jagged
    assert [row.tolist() for row in back.batch["r"].unbind()] == [[0, 1], [0, 1, 2]]


def test_a_deep_copy_of_columns_is_independent() -> None:
    data = three_rows()
    data.select(["obs"], deepcopy=True).batch["obs"][0, 0] = 9
    assert data.batch["obs"][0, 0] == 1
    data.select(["obs"]).batch["obs"][0, 0] = 9
    assert data.batch["obs"][0, 0] == 9


def _plain(serialized: tuple) -> tuple:
    return (*serialized[:2], bytes(serialized[2]))
