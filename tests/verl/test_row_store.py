"""Rows that stay with the workers reach whoever asks for them, whatever the layouts and however they were chosen."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from typing import NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel.launcher import run_ranks
from verl.protocol import DataProto
from verl.workers.row_server import Address, RowServer, RowsRequest, RowsUnavailableError, fetch_rows
from verl.workers.row_store import RowStore, controller_batch, worker_batch

WORLD, ROWS_PER_REPLICA, WIDTH = 4, 3, 5
LAYERS, CHOICES = 4, 2
LATE_S = 3.0
GENERATED = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs")


def generated(replica: int) -> DataProto:
    """Three rows whose every value says which row and column it is."""
    first = replica * ROWS_PER_REPLICA
    ids = torch.arange(first, first + ROWS_PER_REPLICA)[:, None] * 100 + torch.arange(2 * WIDTH)
    mask = (torch.arange(2 * WIDTH) % (torch.arange(ROWS_PER_REPLICA)[:, None] + 2) != 0).long()
    layers = torch.arange(LAYERS * CHOICES).view(LAYERS, CHOICES)
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": mask.cumsum(-1),
        "responses": ids[:, WIDTH:],
        "response_mask": mask[:, WIDTH:],
        "rollout_log_probs": -ids[:, WIDTH:] / 7.0,
        "routed_experts": (ids[:, :, None, None] % 16 * 8 + layers).to(torch.uint8),
    }
    reasons = [f"end of {row}" for row in range(first, first + ROWS_PER_REPLICA)]
    return DataProto.from_dict(tensors, {"finish_reason": reasons}, {"timing": {"generate_sequences": 1.0}})


def new_store(timeout_s: float = 60) -> RowStore:
    return RowStore(dist.distributed_c10d._get_default_group(), timeout_s)


def batch_of_all(store: RowStore, replica_size: int) -> DataProto:
    """The controller's batch, as every rank's output makes it up."""
    outputs: list[DataProto] = [DataProto()] * WORLD
    dist.all_gather_object(outputs, store.store_generated(generated(dist.get_rank() // replica_size), replica_size))
    return DataProto.concat(outputs[::replica_size])


def fetch_everywhere(replica_size: int, wanted: list[list[int]]) -> list[bool]:
    """In every rank: keep, fetch this rank's ``wanted`` rows, keep a new column of them, fetch that, and compare."""
    rank, num_replicas = dist.get_rank(), WORLD // replica_size
    store = new_store()
    batch = batch_of_all(store, replica_size)
    whole = DataProto.concat([generated(replica) for replica in range(num_replicas)])
    checks = [sorted(batch.batch.keys()) == ["response_mask", "responses"]]
    checks += [batch.row_refs is not None and list(batch.row_refs.columns) == [*GENERATED, "routed_experts"]]
    checks += [torch.equal(batch.batch["responses"].long(), whole.batch["responses"])]
    checks += [batch.non_tensor_batch["finish_reason"].tolist() == whole.non_tensor_batch["finish_reason"].tolist()]

    mask = whole.batch["response_mask"]
    batch.batch["advantages"] = torch.arange(len(batch))[:, None] * mask.float()
    batch.batch["returns"] = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    request = worker_batch(batch, "advantages", "returns")[wanted[rank]]
    ours, expected = batch[wanted[rank]], whole[wanted[rank]]
    fetched = store.fetch(request, (*GENERATED, "routed_experts"), layers=([1, 3], LAYERS))
    checks += [torch.equal(fetched.batch[name], expected.batch[name]) for name in GENERATED]
    checks += [fetched.batch[name].dtype == expected.batch[name].dtype for name in GENERATED]
    checks += [torch.equal(fetched.batch["routed_experts"], expected.batch["routed_experts"][:, :, [1, 3]])]
    checks += [torch.equal(fetched.batch[name], ours.batch[name]) for name in ("advantages", "returns")]
    checks += [fetched.row_refs is None, "input_ids" not in store.fetch(request, ("response_mask",)).batch]

    # Each rank owns the new column of its rows; the controller concatenates their references, and mixes them again.
    written: list[DataProto] = [DataProto()] * WORLD
    dist.all_gather_object(written, store.store("old_log_probs", expected.batch["rollout_log_probs"] * 2))
    rows = torch.tensor([row for ranks in wanted for row in ranks])
    again = worker_batch(batch)[rows].union(DataProto.concat(written))[torch.randperm(len(rows))]
    back = store.fetch(again, ("input_ids", "old_log_probs"))
    checks += [torch.equal(back.batch["old_log_probs"], -back.batch["input_ids"][:, WIDTH:] / 7.0 * 2)]
    dist.barrier()
    store.close()
    return checks


CASES = {
    "TP2 training from TP1 rollout, uneven": (1, [[0, 1, 9], [0, 1, 9], [2], [2]]),
    "balanced, filtered, repeated, from TP2 rollout": (2, [[2, 0, 2], [1], [3], [5, 4, 0]]),
    "more tensor-parallel ranks than rows": (4, [[2, 1, 0], [1], [0], [2]]),
}


def fetch_past_a_late_rank() -> float:
    """Seconds until this rank has rows of every owner, while the last rank is busy with something else."""
    store = new_store()
    batch = batch_of_all(store, 1)
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == WORLD - 1:
        time.sleep(LATE_S)  # late for its own call, and yet its rows are there for others
    rows = store.fetch(worker_batch(batch), GENERATED)
    assert torch.equal(rows.batch["input_ids"][:, 0], torch.arange(WORLD * ROWS_PER_REPLICA) * 100)
    seconds = time.monotonic() - start
    dist.barrier()
    return seconds


def all_cases() -> tuple[dict[str, list[bool]], float]:
    return {name: fetch_everywhere(*case) for name, case in CASES.items()}, fetch_past_a_late_rank()


def test_any_rank_gets_any_rows_and_waits_for_none_that_is_late() -> None:
    found = run_ranks(all_cases, WORLD)
    for rank, (checks, _) in enumerate(found):
        assert all(all(case) for case in checks.values()), (rank, checks)
    *others, late = [seconds for _, seconds in found]
    assert late >= LATE_S > max(others)


def request_missing_rows() -> list[str]:
    """The errors of rank 1 for rows of rank 0 that were replaced by the next batch, freed, or never there."""
    store = new_store()
    others = [generated(0).meta_info] * 2
    messages = []
    first = store.store_generated(generated(0), 1)
    dist.all_gather_object(others, first)
    rows_of_0 = worker_batch(others[0])
    dist.barrier()
    for change in (lambda: store.store_generated(generated(0), 1), store.drop):
        if dist.get_rank() == 0:
            change()
        dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises(RowsUnavailableError) as caught:
                store.fetch(rows_of_0, GENERATED)
            messages.append(str(caught.value))
        dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(RowsUnavailableError) as wrong_layers:
            store.fetch(rows_of_0, ("routed_experts",), layers=([0], 3))
        messages.append(str(wrong_layers.value))
    dist.barrier()
    return messages


def test_rows_that_are_gone_are_named_with_their_owner() -> None:
    _, (replaced, freed, _) = run_ranks(request_missing_rows, 2)
    assert replaced.startswith("rows of rank 0 (127.0.0.1:")
    assert "input_ids of generated batch 1 was requested, but the last one is batch 2, of which input_ids" in replaced
    assert "batch 2, of which nothing is stored" in freed and "train on them before that" in freed


def train_on_two_generations() -> list[bool]:
    """A step generates twice and trains on some rows of each; the next one frees both."""
    store, rank = new_store(), dist.get_rank()
    outputs: list[list[DataProto]] = [[], []]
    dist.all_gather_object(
        outputs, [store.store_generated(generated(rank + 2 * time), 1, keeps_earlier=time > 0) for time in (0, 1)]
    )
    first, second = (DataProto.concat([of_rank[time] for of_rank in outputs]) for time in (0, 1))
    batch = DataProto.concat([first[[5, 1]], second[[0, 4]]])
    expected = torch.tensor([5, 1, 6, 10]) * 100
    checks = [torch.equal(store.fetch(worker_batch(batch), ("input_ids",)).batch["input_ids"][:, 0], expected)]
    mine = worker_batch(batch).chunk(2)[rank]
    scores = store.fetch(mine, ("rollout_log_probs",)).batch["rollout_log_probs"] * 2
    written: list[DataProto] = [DataProto()] * 2
    dist.all_gather_object(written, store.store("old_log_probs", scores))
    back = store.fetch(worker_batch(batch.union(DataProto.concat(written))), ("old_log_probs", "rollout_log_probs"))
    checks += [torch.equal(back.batch["old_log_probs"], back.batch["rollout_log_probs"] * 2)]
    dist.barrier()
    store.store_generated(generated(rank), 1)
    dist.barrier()
    for old in (first, second):
        with pytest.raises((RowsUnavailableError, ValueError), match="but the last one is batch 3"):
            store.fetch(worker_batch(old), ("input_ids",))
    dist.barrier()
    store.close()
    return checks


def test_rows_of_all_generations_of_a_step_are_there_until_the_next() -> None:
    for checks in run_ranks(train_on_two_generations, 2):
        assert checks == [True, True]


def rows(asked: RowsRequest) -> np.ndarray:
    if asked.column != "x":
        raise ValueError(f"no column {asked.column}")
    return np.arange(10, dtype=np.int32)[list(asked.slots)]


def test_a_server_answers_only_who_knows_its_token_and_survives_noise() -> None:
    server = RowServer("127.0.0.1", rows, timeout_s=5)
    asked = [RowsRequest(1, "x", (3, 1)), RowsRequest(1, "x", ())]
    try:
        host, port = server.address.host, server.address.port
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\5hello", b""):
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(noise)
        with pytest.raises(RowsUnavailableError, match="closed"):
            fetch_rows({0: (Address(host, port, "guessed"), asked)}, timeout_s=5)
        with pytest.raises(RowsUnavailableError, match=r"rank 7 \(127.0.0.1:\d+\): no column y"):
            fetch_rows({7: (server.address, [RowsRequest(1, "y", (0,))])}, timeout_s=5)
        ((first, second),) = fetch_rows({7: (server.address, asked)}, timeout_s=5).values()
        assert first.tolist() == [3, 1] and second.shape == (0,) and first.dtype == np.int32
    finally:
        server.close()
    with pytest.raises(RowsUnavailableError, match="rank 7 .*Connection refused"):
        fetch_rows({7: (server.address, asked)}, timeout_s=5)


def test_a_server_outlives_a_shortage_of_files_and_threads_and_a_silent_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = RowServer("127.0.0.1", rows, timeout_s=0.2)
    asked = {7: (server.address, [RowsRequest(1, "x", (3,))])}
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with socket.socket() as waiting:
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limit[1]))
            files: list[int] = []
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    files.append(os.open(os.devnull, os.O_RDONLY))
            waiting.connect((server.address.host, server.address.port))  # the server cannot take it
            time.sleep(0.3)
            for file in files:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            assert [one.tolist() for one in fetch_rows(asked, timeout_s=5)[7]] == [[3]]
            assert "could not take a client, and goes on" in caplog.text
            waiting.settimeout(5)
            assert waiting.recv(1) == b""  # a client that sends nothing is given up
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with socket.create_connection((server.address.host, server.address.port), timeout=5) as refused:
                assert refused.recv(1) == b""
        assert [one.tolist() for one in fetch_rows(asked, timeout_s=5)[7]] == [[3]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        server.close()


def no_thread(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


def test_an_owner_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], "")
        start = time.monotonic()
        with pytest.raises(RowsUnavailableError, match=r"rank 3 .*nothing came for 0.5 s"):
            fetch_rows({3: (address, [RowsRequest(1, "x", (0,))])}, timeout_s=0.5)
        assert time.monotonic() - start < 5


def test_a_batch_without_references_is_sent_whole_and_comes_as_it_is() -> None:
    plain = generated(0)
    assert worker_batch(plain, "responses") is plain and plain.row_refs is None
    assert sorted(controller_batch(plain).batch.keys()) == ["response_mask", "responses"]
