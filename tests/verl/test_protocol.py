"""DataProto: what each operation keeps, and what it refuses."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.row_refs import RowRefs


def make_batch(num_rows: int = 4) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(num_rows * 3).reshape(num_rows, 3), "mask": torch.ones(num_rows, dtype=torch.bool)},
        non_tensors={"uid": [f"u{i}" for i in range(num_rows)], "ids": [[i, i + 1] for i in range(num_rows)]},
        meta_info={"temperature": 0.7},
    )


def uids(data: DataProto) -> list[str]:
    return data.non_tensor_batch["uid"].tolist()


def test_lists_of_equal_length_stay_one_object_per_row() -> None:
    assert make_batch().non_tensor_batch["ids"].shape == (4,)


def test_different_row_counts_are_named() -> None:
    with pytest.raises(ValueError, match="'a': 2.*'b': 3"):
        DataProto.from_dict(tensors={"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="'a': 2.*'b': 3"):
        DataProto.from_dict(tensors={"a": torch.zeros(2)}, non_tensors={"b": [1, 2, 3]})


def test_from_single_dict_sorts_by_type_and_refuses_others() -> None:
    data = DataProto.from_single_dict({"a": torch.zeros(2), "b": np.array(["x", "y"], dtype=object)})
    assert list(data.batch.keys()) == ["a"] and list(data.non_tensor_batch) == ["b"]
    with pytest.raises(ValueError, match=r"c \(list\)"):
        DataProto.from_single_dict({"c": [1]})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "index", [slice(1, 3), [1, 2], np.array([1, 2]), torch.tensor([1, 2]), [False, True, True, False]]
)
def test_indexing_by_rows(index: Any) -> None:
    data = make_batch()[index]
    assert uids(data) == ["u1", "u2"] and data.batch["x"][:, 0].tolist() == [3, 6]
    assert data.meta_info == {"temperature": 0.7}


def test_empty_selection_and_negative_step() -> None:
    assert len(make_batch()[[]]) == 0
    assert uids(make_batch()[::-1]) == ["u3", "u2", "u1", "u0"]


def test_a_row_by_its_index() -> None:
    item = make_batch()[2]
    assert item.non_tensor_batch["uid"] == "u2" and item.batch["x"].tolist() == [6, 7, 8]


def test_select_and_pop_name_what_is_missing() -> None:
    data = make_batch()
    assert list(data.select(batch_keys=["x"], non_tensor_batch_keys=[]).batch.keys()) == ["x"]
    with pytest.raises(ValueError, match=r"batch has no \['y'\].*meta_info has no \['z'\]"):
        data.select(batch_keys=["y"], meta_info_keys=["z"])
    popped = data.pop(batch_keys=["x", "mask"], non_tensor_batch_keys=["ids"], meta_info_keys=["temperature"])
    assert (
        list(data.batch.keys()) == []
        and uids(data) == ["u0", "u1", "u2", "u3"]
        and len(data) == 4
        and not data.meta_info
    )
    assert len(popped) == 4 and popped.meta_info == {"temperature": 0.7}


def test_rename() -> None:
    data = make_batch().rename("x", "y")
    assert set(data.batch.keys()) == {"y", "mask"}
    with pytest.raises(ValueError, match="overwrite"):
        data.rename(["y"], ["mask"])


def test_union_takes_equal_values_and_refuses_others() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    data = DataProto.from_dict(tensors={"a": nan}, non_tensors={"u": [[1], "b"]})
    data.union(DataProto.from_dict(tensors={"a": nan.clone(), "b": torch.ones(2)}, non_tensors={"u": [[1], "b"]}))
    assert set(data.batch.keys()) == {"a", "b"}
    with pytest.raises(ValueError, match=r"batch has different values for \['b'\]"):
        data.union(DataProto.from_dict(tensors={"b": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"non_tensor_batch has different values for \['u'\]"):
        data.union(DataProto.from_dict(non_tensors={"u": [[2], "b"]}))
    with pytest.raises(ValueError, match="2 and 3 rows"):
        data.union(DataProto.from_dict(tensors={"c": torch.zeros(3)}))
    assert len(DataProto().union(data)) == 2


def test_repeat_orders() -> None:
    data = make_batch(2)
    assert uids(data.repeat(2, interleave=True)) == ["u0", "u0", "u1", "u1"]
    assert uids(data.repeat(2, interleave=False)) == ["u0", "u1", "u0", "u1"]


def test_chunk_split_concat_round_trip() -> None:
    data = make_batch(6)
    for parts in (data.chunk(3), data.split(4)):
        back = DataProto.concat(parts)
        assert torch.equal(back.batch["x"], data.batch["x"]) and uids(back) == uids(data)
    assert [len(part) for part in data.split(4)] == [4, 2]
    with pytest.raises(ValueError, match="6 rows does not split into 4"):
        data.chunk(4)


def test_concat_skips_empty_parts_and_joins_reports() -> None:
    reporting = DataProto(meta_info={"metrics": {"loss": 1.0}})
    assert len(DataProto()) == 0 and len(DataProto.concat([])) == 0
    merged = DataProto.concat([DataProto(), reporting, make_batch()])
    assert len(merged) == 4 and merged.meta_info == {"temperature": 0.7, "metrics": {"loss": [1.0]}}
    assert DataProto.concat([reporting, DataProto()]).meta_info == {"metrics": {"loss": [1.0]}}
    with pytest.raises(ValueError, match="part 1"):
        DataProto.concat([make_batch(), make_batch().select(batch_keys=["x"])])


def test_references_to_remote_columns_follow_their_rows() -> None:
    places = np.stack([np.full(4, 1), np.arange(4) % 2, np.arange(4) // 2], axis=1).astype(np.int32)
    data = make_batch()
    data.row_refs = RowRefs({"input_ids": places})

    def slots_of(batch: DataProto) -> list[list[int]]:
        assert batch.row_refs is not None and len(batch.row_refs) == len(batch)
        return batch.row_refs.columns["input_ids"].tolist()

    expected = places.tolist()
    assert slots_of(data.select(batch_keys=["x"])) == slots_of(pickle.loads(pickle.dumps(data))) == expected
    assert slots_of(data.select_idxs([3, 0])) == [expected[3], expected[0]]
    assert slots_of(data.repeat(2, interleave=False)) == expected * 2
    assert slots_of(DataProto.concat(data.chunk(2))) == slots_of(DataProto.concat([DataProto(), data])) == expected
    assert data.pop(batch_keys=["x"]).row_refs is None and slots_of(data) == expected
    scored = DataProto(row_refs=RowRefs({"old_log_probs": places + 1}))
    assert len(scored) == 4 and len(scored[1:3]) == 2
    joined = data.select().union(scored)
    joined.reorder([2, 0, 3, 1])
    assert slots_of(joined) == [expected[row] for row in (2, 0, 3, 1)]
    assert joined.row_refs is not None and joined.row_refs.columns["old_log_probs"][0].tolist() == [2, 1, 2]
    assert data.row_refs is not None and "old_log_probs" not in data.row_refs
    with pytest.raises(ValueError, match="different references for \\['input_ids'\\]"):
        data.union(DataProto(row_refs=RowRefs({"input_ids": places + 1})))
    with pytest.raises(ValueError, match="different numbers of rows.*'remote input_ids': 3"):
        DataProto.from_dict({"x": torch.zeros(4)}, row_refs=RowRefs({"input_ids": places[:3]}))
    with pytest.raises(ValueError, match="part 1"):
        DataProto.concat([data, make_batch()])


def test_reorder() -> None:
    data = make_batch()
    data.reorder(torch.tensor([2, 0, 3, 1]))
    assert uids(data) == ["u2", "u0", "u3", "u1"] and data.batch["x"][0].tolist() == [6, 7, 8]


def test_padding_round_trip() -> None:
    padded, pad_size = pad_dataproto_to_divisor(make_batch(3), 8)
    assert (len(padded), pad_size) == (8, 5) and uids(padded)[3:6] == ["u0", "u1", "u2"]
    assert uids(unpad_dataproto(padded, pad_size)) == ["u0", "u1", "u2"]
    same, none = pad_dataproto_to_divisor(padded, 4)
    assert same is padded and none == 0 and unpad_dataproto(same, 0) is same


def test_pickle_carries_only_its_rows_and_is_writable() -> None:
    data = DataProto.from_dict(tensors={"x": torch.randn(1000, 100), "h": torch.ones(1000, dtype=torch.bfloat16)})
    blob = pickle.dumps(data.chunk(100)[1])
    assert len(blob) < 8000
    part = pickle.loads(blob)
    assert torch.equal(part.batch["x"], data.batch["x"][10:20]) and part.batch["h"].dtype == torch.bfloat16
    part.batch["x"].add_(1)
    assert len(pickle.loads(pickle.dumps(data[[]]))) == 0
    assert pickle.loads(pickle.dumps(DataProto(meta_info={"a": 1}))).meta_info == {"a": 1}
