"""Upstream's small functions for plug-ins: tensors and files, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verl.utils import fs, hdfs_io
from verl.utils import torch_functional as verl_F


def test_masked_statistics() -> None:
    values, mask = torch.tensor([[1.0, 3.0], [float("nan"), 5.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert verl_F.masked_sum(values, mask).item() == 9 and verl_F.masked_mean(values, mask).item() == pytest.approx(3)
    assert verl_F.masked_mean(values, mask, axis=-1).tolist() == pytest.approx([2, 5])
    values = values.nan_to_num()
    assert verl_F.masked_var(values, mask).item() == pytest.approx(4)
    assert verl_F.masked_var(values, mask, unbiased=False).item() == pytest.approx(8 / 3)
    whitened = verl_F.masked_whiten(values, mask)[mask > 0]
    assert whitened.tolist() == pytest.approx([-1, 0, 1], abs=1e-6)
    assert verl_F.masked_whiten(values, mask, shift_mean=False)[mask > 0].tolist() == pytest.approx([2, 3, 4], abs=1e-5)
    with pytest.raises(ValueError, match="needs two"):
        verl_F.masked_var(values, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


def test_padding_and_truncation() -> None:
    ids, mask = torch.tensor([[1, 2, 3, 4, 5]]), torch.ones(1, 5, dtype=torch.long)
    found = verl_F.postprocess_data(ids, mask, 7, 9)
    assert [part.tolist() for part in found] == [[[9, 9, 1, 2, 3, 4, 5]], [[0, 0, 1, 1, 1, 1, 1]]]
    cut = {way: verl_F.postprocess_data(ids, mask, 3, 9, truncation=way)[0].tolist() for way in ("left", "right")}
    assert cut == {"left": [[3, 4, 5]], "right": [[1, 2, 3]]}
    assert verl_F.postprocess_data(ids, mask, 3, 9, truncation="middle")[0].tolist() == [[1, 4, 5]]
    with pytest.raises(ValueError, match="5 tokens are more than max_length 3"):
        verl_F.postprocess_data(ids, mask, 3, 9)


def test_local_files_are_used_where_they_are() -> None:
    assert fs.copy_to_local("/data/train.parquet", "/cache", use_shm=True) == "/data/train.parquet"
    with pytest.raises(ValueError, match="fetch it first"):
        fs.copy_to_local("hdfs://host/train.parquet")


def test_data_preparation_makes_folders_and_copies_into_them(tmp_path: Path) -> None:
    """The two calls at the end of upstream's scripts that write parquet files."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_text("rows")
    hdfs_io.makedirs(str(tmp_path / "shared" / "gsm8k"))
    hdfs_io.copy(src=str(tmp_path / "data"), dst=str(tmp_path / "shared" / "gsm8k"))
    assert hdfs_io.exists(str(tmp_path / "shared" / "gsm8k" / "train.parquet"))
    with pytest.raises(ValueError, match="HDFS is not reached"):
        hdfs_io.copy(str(tmp_path / "data"), "hdfs://host/gsm8k")
