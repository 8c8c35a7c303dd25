"""Upstream's small functions for plug-ins: tensors and files, against values worked out by hand."""

from __future__ import annotations

import os
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


def test_response_masks_end_with_the_first_end_token() -> None:
    ids = torch.tensor([[5, 1, 7, 1], [5, 6, 7, 8], [2, 5, 5, 5]])
    assert verl_F.get_response_mask(ids, 1).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    found = verl_F.get_response_mask(ids, [1, 2], dtype=torch.bool)
    assert found.dtype == torch.bool and found.sum(-1).tolist() == [2, 4, 1]


def test_padding_and_truncation() -> None:
    assert verl_F.pad_2d_list_to_length([[1, 2], [3]], 0, 4).tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]
    ids, mask = torch.tensor([[1, 2, 3, 4, 5]]), torch.ones(1, 5, dtype=torch.long)
    found = verl_F.postprocess_data(ids, mask, 7, 9)
    assert [part.tolist() for part in found] == [[[9, 9, 1, 2, 3, 4, 5]], [[0, 0, 1, 1, 1, 1, 1]]]
    cut = {way: verl_F.postprocess_data(ids, mask, 3, 9, truncation=way)[0].tolist() for way in ("left", "right")}
    assert cut == {"left": [[3, 4, 5]], "right": [[1, 2, 3]]}
    assert verl_F.postprocess_data(ids, mask, 3, 9, truncation="middle")[0].tolist() == [[1, 4, 5]]
    with pytest.raises(ValueError, match="5 tokens are more than max_length 3"):
        verl_F.postprocess_data(ids, mask, 3, 9)


def test_local_files_are_used_where_they_are_and_copied_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "a").write_text("abc")
    assert fs.copy_to_local(str(folder)) == str(folder)
    assert fs.copy(str(folder), str(tmp_path / "copy")) == str(tmp_path / "copy")
    assert fs.verify_copy(str(folder), str(tmp_path / "copy"))
    (tmp_path / "copy" / "part" / "a").write_text("ab")
    assert not fs.verify_copy(str(folder), str(tmp_path / "copy"))
    assert fs.local_mkdir_safe(str(tmp_path / "x" / "y")) == str(tmp_path / "x" / "y") and hdfs_io.exists(str(tmp_path))
    hdfs_io.makedirs(str(tmp_path / "x"), exist_ok=True)
    with pytest.raises(FileExistsError):
        hdfs_io.makedirs(str(tmp_path / "x"))


def test_remote_files_come_through_the_hadoop_client_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "hdfs://host/models/tiny"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="hdfs is not on PATH"):
        fs.copy_to_local(source, cache_dir=str(tmp_path))
    log = tmp_path / "log"
    client = tmp_path / "hdfs"
    client.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ "$2" = -get ] && echo data > "$5"\n[ "$2" != -test ]\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    path = fs.copy_to_local(source, cache_dir=str(tmp_path))
    assert Path(path).read_text() == "data\n" and fs.copy_to_local(source, cache_dir=str(tmp_path)) == path
    assert log.read_text().splitlines() == [f"dfs -get -f {source} {path}"]
    assert not hdfs_io.exists(source)
    with pytest.raises(OSError, match="failed"):
        client.write_text("#!/bin/sh\necho no such path >&2\nexit 1\n")
        hdfs_io.copy(source, str(tmp_path / "other"))
    with pytest.raises(ValueError, match="without it"):
        fs.copy_to_local(source + "/", cache_dir=str(tmp_path))
