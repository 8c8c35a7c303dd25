"""Upstream's small utilities: tensors, precisions, timers, files, against values worked out by hand."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel.launcher import run_ranks
from verl.protocol import DataProto
from verl.utils import fs, hdfs_io
from verl.utils import torch_functional as verl_F
from verl.utils.debug.metrics import calculate_debug_metrics, calculate_token_list_diff
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer
from verl.utils.profiler.performance import reduce_timing, topk_reduce_ratio_min_max
from verl.utils.torch_dtypes import PrecisionType


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_entropy_of_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]]).to(dtype)
    labels = torch.tensor([[1, 0]])
    expected = torch.tensor([[math.log(0.75), math.log(0.5)]])
    for function in (verl_F.logprobs_from_logits, verl_F.logprobs_from_logits_naive, verl_F.logprobs_from_logits_v2):
        torch.testing.assert_close(function(logits, labels).float(), expected, atol=5e-3, rtol=0)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    found = verl_F.entropy_from_logits(logits.float())
    torch.testing.assert_close(found, torch.tensor([[entropy, math.log(2.0)]]), atol=5e-3, rtol=0)
    assert torch.allclose(verl_F.entropy_from_logits_with_chunking(logits[0].float(), 1), found[0])


def test_log_probs_of_responses_with_and_without_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 3, 1, 2, 4, 0], [2, 2, 3, 1, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    logits = torch.randn(2, 6, 5, generator=generator)
    whole = verl_F.log_probs_from_logits_response(ids, logits, 3)
    assert torch.allclose(whole[0, 0], logits[0, 2].log_softmax(-1)[2])
    indices, offsets, longest = verl_F.get_unpad_data(mask)
    assert offsets.tolist() == [0, 4, 8] and longest == 4
    packed = verl_F.log_probs_from_logits_response_rmpad(ids, mask, logits.flatten(0, 1)[indices], 3)
    assert torch.allclose((packed * mask[:, 3:])[:, :1], whole[:, :1]) and torch.allclose(packed[0, 1], whole[0, 1])


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
    assert verl_F.remove_pad_token(*found) == [[1, 2, 3, 4, 5]]
    cut = {way: verl_F.postprocess_data(ids, mask, 3, 9, truncation=way)[0].tolist() for way in ("left", "right")}
    assert cut == {"left": [[3, 4, 5]], "right": [[1, 2, 3]]}
    assert verl_F.postprocess_data(ids, mask, 3, 9, truncation="middle")[0].tolist() == [[1, 4, 5]]
    with pytest.raises(ValueError, match="5 tokens are more than max_length 3"):
        verl_F.postprocess_data(ids, mask, 3, 9)


def test_post_processed_logits_keep_the_chosen_tokens() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()  # probabilities 0.4, 0.3, 0.2, 0.1
    assert verl_F.post_process_logits(logits, logits, 2.0, None, None).tolist() == [
        pytest.approx((logits / 2)[0].tolist())
    ]
    assert verl_F.post_process_logits(logits, logits, 1.0, 2, 1.0).isfinite().tolist() == [[True, True, False, False]]
    assert verl_F.post_process_logits(logits, logits, 1.0, -1, 0.8).isfinite().tolist() == [[True, True, True, False]]


def test_schedules() -> None:
    def rates(make: object, *args: object, **kwargs: object) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        schedule = make(optimizer, *args, **kwargs)  # type: ignore[operator]
        found = []
        for _ in range(9):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    assert rates(verl_F.get_constant_schedule_with_warmup, 2)[:4] == [0, 1, 2, 2]
    cosine = rates(verl_F.get_cosine_schedule_with_warmup, 2, 6, min_lr_ratio=0.1, init_lr_ratio=0.5)
    assert (
        cosine[:3] == pytest.approx([1, 1.5, 2]) and cosine[4] == pytest.approx(1.1) and cosine[6] == pytest.approx(0.2)
    )
    wsd = rates(verl_F.get_wsd_schedule_with_warmup, 2, 8, min_lr_ratio=0.1, stable_ratio=0.5)
    assert wsd[1:6] == [1, 2, 2, 2, 2] and wsd[5] > wsd[6] > wsd[7] and wsd[8] == pytest.approx(0.2)


def test_gradients_and_batches() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert verl_F.compute_grad_norm(model) == 25.0
    batch = DataProto.from_dict({"a": torch.arange(4)}).batch
    assert [part["a"].tolist() for part in verl_F.split_dict_tensor_into_batches(batch, 2)] == [[0, 1], [2, 3]]


def test_statistics_and_timers_over_ranks() -> None:
    found = run_ranks(_over_ranks, 2)
    assert found[0] == found[1]
    mean, largest, smallest, deviation, masked, gathered, broadcast, timing, tail = found[0]
    values = np.array([0.0, 1.0, 2.0, 10.0, 11.0, 12.0])
    assert (mean, largest, smallest) == (6.0, 12.0, 0.0) and deviation == pytest.approx(values.std(ddof=1))
    assert masked == pytest.approx((0 + 1 + 10 + 11) / 4) and gathered == values.tolist() and broadcast == [0, 1, 2]
    assert timing == {"a": 1.5, "b": 4.0} and tail == (0.5, 1.0, 2.0)


def _over_ranks() -> tuple:
    rank = dist.get_rank()
    values = torch.arange(3.0) + 10 * rank
    statistics = [float(value) for value in verl_F.distributed_mean_max_min_std(values.clone())]  # type: ignore[arg-type]
    masked = float(verl_F.distributed_masked_mean(values, torch.tensor([1.0, 1.0, 0.0])))
    gathered = verl_F.allgather_dict_tensors({"x": values}, 2, None)["x"].tolist()
    copied = {"x": values.clone()}
    verl_F.broadcast_dict_tensor(copied, 0, None)
    timing = reduce_timing({"b": 4.0, "a": 1.0 + rank})
    return *statistics, masked, gathered, copied["x"].tolist(), timing, topk_reduce_ratio_min_max(1.0 + rank)


def test_precisions() -> None:
    assert PrecisionType.to_dtype("bf16") is torch.bfloat16 and PrecisionType.to_dtype(16) is torch.float16
    assert PrecisionType.to_str(torch.float32) == "fp32" and PrecisionType.is_bf16(torch.bfloat16)
    assert PrecisionType.supported_type(16) and not PrecisionType.supported_type("8")
    with pytest.raises(RuntimeError, match="'int8' is not known"):
        PrecisionType.to_dtype("int8")


def test_metrics_are_reduced_as_their_names_say() -> None:
    given = {"loss": [1.0, 3.0], "length/max": [1, 7], "length/min": [1, 7]}
    assert reduce_metrics(given) == {"loss": 2.0, "length/max": 7, "length/min": 1}


def test_timers_add_up_also_when_something_raises() -> None:
    timing: dict[str, float] = {}
    with pytest.raises(KeyError), simple_timer("a", timing):
        raise KeyError
    first = timing["a"]
    with marked_timer("a", timing, color="red"):
        pass
    assert timing["a"] > first >= 0


def test_memory_lines_say_nothing_on_a_cpu_and_pass_results_on(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test_memory")
    with caplog.at_level(logging.DEBUG, logger="test_memory"):
        log_gpu_memory_usage("here", logger)
        assert GPUMemoryLogger("actor", logger)(lambda x: x + 1)(2) == 3
    if not torch.cuda.is_available():
        assert not caplog.records


def test_debug_metrics_by_hand() -> None:
    ours, theirs = torch.tensor([[0.5, 0.25, 0.9]]), torch.tensor([[0.4, 0.35, 0.1]])
    tensors = {
        "responses": torch.zeros(1, 3),
        "response_mask": torch.tensor([[1, 1, 0]]),
        "old_log_probs": ours.log(),
        "rollout_log_probs": theirs.log(),
    }
    found = calculate_debug_metrics(DataProto.from_dict(tensors))
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.1)
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    tokens = torch.tensor([[1, 2, 3], [1, 1, 1]]), torch.tensor([[1, 5, 9], [2, 2, 2]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert calculate_token_list_diff(*tokens, mask).tolist() == [0.5, 1.0]


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
