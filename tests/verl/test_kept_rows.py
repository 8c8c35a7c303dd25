"""Rows that stay with the workers reach whoever asks for them, whatever the layouts and however they were chosen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.parallel.launcher import run_ranks
from verl.protocol import DataProto
from verl.workers.config import RolloutConfig
from verl.workers.kept_rows import HANDLE, ROWS, KeptRows, worker_batch

WORLD, ROWS_PER_REPLICA, WIDTH = 4, 3, 5


def generated(replica: int) -> DataProto:
    """Three rows whose every value says which row and column it is."""
    first = replica * ROWS_PER_REPLICA
    ids = torch.arange(first, first + ROWS_PER_REPLICA)[:, None] * 100 + torch.arange(2 * WIDTH)
    mask = (torch.arange(2 * WIDTH) % (torch.arange(ROWS_PER_REPLICA)[:, None] + 2) != 0).long()
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": mask.cumsum(-1),
        "responses": ids[:, WIDTH:],
        "response_mask": mask[:, WIDTH:],
        "rollout_log_probs": -ids[:, WIDTH:] / 7.0,
    }
    reasons = [f"end of {row}" for row in range(first, first + ROWS_PER_REPLICA)]
    return DataProto.from_dict(tensors, {"finish_reason": reasons}, {"timing": {"generate_sequences": 1.0}})


def fetch_everywhere(replica_size: int, wanted: list[list[int]]) -> list[bool]:
    """In every rank: keep, let each rank ask for its ``wanted`` rows, write a column home, fetch, and compare."""
    rank, num_replicas = dist.get_rank(), WORLD // replica_size
    kept = KeptRows(dist.distributed_c10d._get_default_group(), replica_size, torch.device("cpu"))
    returned = kept.keep(generated(rank // replica_size))
    everything: list[DataProto | None] = [None] * WORLD
    dist.all_gather_object(everything, returned)
    batch = DataProto.concat([part for part in everything[::replica_size] if part is not None])
    whole = DataProto.concat([generated(replica) for replica in range(num_replicas)])
    checks = [sorted(batch.batch.keys()) == sorted(["responses", "response_mask", ROWS])]
    checks += [torch.equal(batch.batch["responses"].long(), whole.batch["responses"])]
    checks += [batch.non_tensor_batch["finish_reason"].tolist() == whole.non_tensor_batch["finish_reason"].tolist()]

    batch.batch["advantages"] = torch.arange(len(batch))[:, None] * 1.0
    request, expected = worker_batch(batch, "advantages")[wanted[rank]], whole[wanted[rank]]
    fetched = kept.fetch(request)
    names = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs")
    checks += [torch.equal(fetched.batch[name], expected.batch[name]) for name in names]
    checks += [fetched.batch[name].dtype == expected.batch[name].dtype for name in names]
    checks += [torch.equal(fetched.batch["advantages"][:, 0], torch.tensor(wanted[rank], dtype=torch.float32))]

    writes = rank % 2 == 1  # the even ranks have nothing to send
    column = expected.batch["rollout_log_probs"] * 2 if writes else None
    kept.write(request, "old_log_probs", column)
    written = sorted({row for ranks in wanted[1::2] for row in ranks})
    back = kept.fetch(worker_batch(batch)[written])
    checks += [torch.equal(back.batch["old_log_probs"], whole[written].batch["rollout_log_probs"] * 2)]
    kept.drop()
    try:
        kept.fetch(request)
    except ValueError as error:
        return [*checks, "batch 1, which has been freed since" in str(error)]
    return [*checks, False]


CASES = {
    "TP2 training from TP1 rollout, uneven": (1, [[0, 1, 9], [0, 1, 9], [2], [2]]),
    "balanced, filtered to nothing on one rank, from TP2 rollout": (2, [[2, 0], [1], [], [5, 4, 0]]),
    "more tensor-parallel ranks than rows": (4, [[2, 1, 0], [1], [0], [2]]),
}


def all_cases() -> dict[str, list[bool]]:
    return {name: fetch_everywhere(*case) for name, case in CASES.items()}


def test_any_rank_gets_any_rows() -> None:
    for rank, checks in enumerate(run_ranks(all_cases, WORLD)):
        assert all(all(found) for found in checks.values()), (rank, checks)


def one_process_keeps_two_batches() -> tuple[str, int, bool]:
    """What is said of the first batch's handle after the second has come, rows that are kept, a plain batch's fate."""
    kept = KeptRows(dist.distributed_c10d._get_default_group(), 1, torch.device("cpu"))
    first = kept.keep(generated(0))
    second = kept.keep(generated(0))
    plain = generated(0)
    is_untouched = kept.fetch(plain) is plain
    with pytest.raises(ValueError) as stale:
        kept.fetch(worker_batch(first))
    return str(stale.value), len(kept.fetch(worker_batch(second))), is_untouched


def test_a_stale_handle_is_named_and_a_plain_batch_stays_as_it_is() -> None:
    ((message, num_rows, is_untouched),) = run_ranks(one_process_keeps_two_batches, 1)
    assert "rows of generated batch 1, but the workers' last one is batch 2" in message
    assert "device_handover=false" in message
    assert (num_rows, is_untouched) == (ROWS_PER_REPLICA, True)


def test_the_switch_follows_the_device_unless_it_is_set() -> None:
    assert RolloutConfig().keeps_rows("npu") and not RolloutConfig().keeps_rows("cpu")
    assert RolloutConfig(device_handover="True").keeps_rows("cpu")
    assert not RolloutConfig(device_handover="false").keeps_rows("npu")
    assert "device_handover" in RolloutConfig(device_handover="yes").problems("rollout")[0]


def test_a_plain_batch_is_sent_whole() -> None:
    plain = generated(0)
    assert worker_batch(plain, "responses") is plain and HANDLE not in plain.meta_info
