"""Samples of several turns: rows are exactly what the engine was given and sampled, in any layout of an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.parallel.launcher import run_ranks
from tests.vllm.serving import write_served_checkpoint
from verl.experimental.agent_loop.environment import EnvironmentSpec
from verl.experimental.agent_loop.host import HostSettings
from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.utils.dataset.prompt_items import ENVIRONMENT_ROW
from verl.workers.config import RolloutConfig
from verl.workers.config.multi_turn import MultiTurnConfig
from verl.workers.rollout.rollout_messages import ENVIRONMENT_SEED, PROMPT, PROMPT_LENGTH, SAMPLE, TURNS, VERSIONS
from verl.workers.rollout.trajectory import Trajectory
from verl.workers.rollout.vllm_rollout.sample_stream import SampleStream
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from vllm.v1.engine import request_codec

WALKS = '''
import asyncio, json, os, random

class Walk:
    """Answers in token ids that follow from its seed and from what it was given, and writes down what it saw."""

    takes_token_ids = True

    def __init__(self, log="", delay_s=0.0):
        self.log, self.delay_s = log, delay_s

    async def reset(self, row, seed):
        self.random, self.row, self.seen = random.Random(seed), row, []
        return self.tokens(self.random.randint(2, 6))

    async def step(self, action):
        await asyncio.sleep(self.delay_s * random.random())
        self.seen.append(action)
        if len(self.seen) == self.row["turns"]:
            if self.log:
                with open(os.path.join(self.log, f"{self.row['name']}.json"), "w") as file:
                    json.dump(self.seen, file)
            return [], 1.0, True
        return self.tokens(self.random.randint(1, 5)), 0.25, False

    def tokens(self, count):
        return [self.random.randint(2, 200) for _ in range(count)]

class Dice(Walk):
    is_deterministic = False

    async def reset(self, row, seed):
        return await super().reset(row, random.random())
'''
META = {"eos_token_id": 1, "pad_token_id": 0}


def config(**given: Any) -> RolloutConfig:
    sizes: dict[str, Any] = {
        "prompt_length": 8,
        "response_length": 96,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 96,
    }
    sizes |= {"multi_turn": MultiTurnConfig(enable=True)}
    return RolloutConfig(**{**sizes, "block_size": 4, "enforce_eager": True, "dtype": "float32", **given})


def settings(folder: str, **kwargs: Any) -> HostSettings:
    return HostSettings(folder, EnvironmentSpec(f"{folder}/walks.py", "Walk", kwargs))


def rollout(folder: str, chosen: RolloutConfig, environments: HostSettings | None) -> vLLMRollout:
    made = vLLMRollout(
        chosen, folder, rollout_ops="vllm.ops.cpu:default_ops", device=torch.device("cpu"), environments=environments
    )
    made.resume(["weights"])
    weights = (pair for file in sorted(Path(folder).glob("*.safetensors")) for pair in load_file(file).items())
    made.inference_engine.load_weights(weights)
    made.resume(["kv_cache"])
    return made


def prompts(turns: Sequence[int]) -> DataProto:
    count = len(turns)
    columns = {
        "raw_prompt_ids": [[2]] * count,
        "sampling_seeds": [1000 + number for number in range(count)],
        ENVIRONMENT_ROW: [{"turns": number, "name": str(index)} for index, number in enumerate(turns)],
        ENVIRONMENT_SEED: [7 + number // 2 for number in range(count)],
    }
    return DataProto.from_dict(non_tensors={name: as_rows(rows) for name, rows in columns.items()}, meta_info=META)


def rows_of(batch: DataProto) -> list[tuple[list[int], list[int], list[bool], list[float]]]:
    """Of each row its prompt, what follows, which of that the model wrote, and its log-probs."""
    found = []
    for row in range(len(batch)):
        valid = batch.batch["attention_mask"][row].bool()
        width = valid.shape[0] - batch.batch["responses"].shape[1]
        response = valid[width:]
        found.append(
            (
                batch.batch["input_ids"][row, :width][valid[:width]].tolist(),
                batch.batch["responses"][row][response].tolist(),
                batch.batch["response_mask"][row][response].bool().tolist(),
                batch.batch["rollout_log_probs"][row][response].tolist(),
            )
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("turns")
    write_served_checkpoint(path)
    # Many tokens end a turn, or a random model would never come to a second one.
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(5, 250, 6)]}))
    (path / "walks.py").write_text(WALKS)
    return str(path)


def one_replica(folder: str, log: str, turns: list[int], **given: Any) -> Any:
    made = rollout(folder, config(**given), settings(folder, log=log, delay_s=0.05))
    batch = made.generate_sequences(prompts(turns))
    scored = [
        made.inference_engine.generate({"prompt_token_ids": [*prompt, *response]}, _prompt_logprobs(), use_tqdm=False)[
            0
        ].prompt_logprobs
        for prompt, response, _, _ in rows_of(batch)
    ]
    expected = [
        [entry[token].logprob for entry, token in zip(found[len(prompt) :], response, strict=True)]
        for found, (prompt, response, _, _) in zip(scored, rows_of(batch), strict=True)
    ]
    columns = batch.non_tensor_batch
    begun = [Trajectory("0", 5, 90, [2], spans=[(0, 1)] * count) for count in range(4)]
    assert len({made._next_turn(sample, META).seed for sample in begun}) == 4  # or every turn would draw alike
    made._host.close()
    return (rows_of(batch), expected, [columns[name].tolist() for name in (TURNS, "finish_reason", PROMPT_LENGTH)])


def _prompt_logprobs() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, prompt_logprobs=0)


def test_a_row_is_what_the_environment_and_the_model_wrote(folder: str, tmp_path: Path) -> None:
    turns = [1, 2, 3, 5, 8, 1, 4, 2, 6, 3, 2, 1]
    [(rows, expected, (records, reasons, lengths))] = run_ranks(one_replica, 1, folder, str(tmp_path), turns)
    whole = 0
    for number, (prompt, response, is_sampled, log_probs) in enumerate(rows):
        record, reason = records[number], reasons[number]
        assert lengths[number] == len(prompt)
        assert is_sampled[-1] and is_sampled[0]
        sampled = [i for i, own in enumerate(is_sampled) if own]
        torch.testing.assert_close(
            [log_probs[i] for i in sampled], [expected[number][i] for i in sampled], atol=2e-4, rtol=0
        )
        assert all(log_probs[i] == 0 for i in range(len(response)) if not is_sampled[i])
        if reason != "stop":
            assert reason == "length"
            continue
        whole += 1
        seen = json.loads((tmp_path / f"{number}.json").read_text())
        assert [token for turn in seen for token in turn] == [response[i] for i in sampled]
        assert record["num_turns"] == turns[number] == len(seen)
        assert [reward for _, reward in record["rewards"]] == [0.25] * (len(seen) - 1) + [1.0]
        ends = [i for i in sampled if i + 1 == len(is_sampled) or not is_sampled[i + 1]]
        assert [position for position, _ in record["rewards"]] == ends
    assert whole >= 6


def two_ranks(folder: str, turns: list[int], given: dict[str, Any]) -> Any:
    made = rollout(folder, config(**given), settings(folder))
    own = turns if given["tensor_model_parallel_size"] == 2 else turns[dist.get_rank() :: 2]
    seeds = prompts(turns)
    mine = (
        seeds
        if given["tensor_model_parallel_size"] == 2
        else seeds.select_idxs(np.arange(dist.get_rank(), len(turns), 2))
    )
    assert len(mine) == len(own)
    rows = rows_of(made.generate_sequences(mine))
    if made._host is not None:
        made._host.close()
    return rows


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])  # the next test has two replicas
def test_two_ranks_write_what_one_does(folder: str, tmp_path: Path, tp: int) -> None:
    turns = [1, 3, 2, 4, 1, 2]
    [(alone, *_)] = run_ranks(one_replica, 1, folder, str(tmp_path), turns)
    ranks = run_ranks(two_ranks, 2, folder, turns, {"tensor_model_parallel_size": tp})
    if tp == 2:
        assert [row[1] for row in ranks[0]] == [row[1] for row in ranks[1]]
        found = ranks[0]
    else:
        found = [ranks[number % 2][number // 2] for number in range(len(turns))]
    assert [row[:3] for row in found] == [row[:3] for row in alone]


def with_one_that_waits(folder: str) -> Any:
    """The first replica's samples wait for their environments throughout, the other's do not."""
    delay_s = 1.0 if dist.get_rank() == 0 else 0.0
    made = rollout(folder, config(), settings(folder, delay_s=delay_s))
    rows = rows_of(made.generate_sequences(prompts([6] if dist.get_rank() == 0 else [2] * 8)))
    made._host.close()
    return rows


def test_a_replica_whose_samples_wait_keeps_nobody(folder: str, tmp_path: Path) -> None:
    first, second = run_ranks(with_one_that_waits, 2, folder)
    [(alone, *_)] = run_ranks(one_replica, 1, folder, str(tmp_path), [2] * 8)
    assert len(first) == 1
    assert [row[:3] for row in second] == [row[:3] for row in alone]


def moved(folder: str, turns: list[int]) -> Any:
    """The rows of a stream, and those of one that another takes over every few steps, with its environments rebuilt."""
    made = rollout(folder, config(), settings(folder))
    found = []
    for is_moved in (False, True):
        stream, parts = SampleStream(made), list[Any]()
        given = prompts(turns)
        given.non_tensor_batch |= {
            "response_limit": as_rows([0] * len(turns)),
            PROMPT: as_rows([number // 2 for number in range(len(turns))]),
            SAMPLE: as_rows([number % 2 for number in range(len(turns))]),
        }
        stream.start(given)
        for _ in range(400):
            parts += stream.run(5 if is_moved else 1000, META)
            if len(parts) == len(turns):
                break
            if is_moved:
                state = request_codec.decode(request_codec.encode(stream.state()))
                stream.abort()
                stream = SampleStream(made)
                stream.restore(state)
        parts.sort(key=lambda sample: sample.request_id)
        batch = stream.rows(parts, META)
        keys = [batch.non_tensor_batch[name].tolist() for name in (PROMPT, SAMPLE, VERSIONS, TURNS)]
        for record in keys[-1]:
            record.pop("seconds")
        found.append((rows_of(batch), keys))
    made._host.close()
    return found


def begun_once_more(folder: str, log: str, turns: list[int]) -> Any:
    """The rows of a stream that others take over twice, in environments that cannot be rebuilt."""
    dice = EnvironmentSpec(f"{folder}/walks.py", "Dice", {"log": log})
    made = rollout(folder, config(), HostSettings(folder, dice, num_processes=len(turns)))
    given = prompts(turns)
    given.non_tensor_batch |= {
        "response_limit": as_rows([0] * len(turns)),
        PROMPT: as_rows(list(range(len(turns)))),
        SAMPLE: as_rows([0] * len(turns)),
    }
    stream, ended = SampleStream(made), list[Any]()
    stream.start(given)
    for max_steps in (10, 10, 10_000):
        ended += stream.run(max_steps, META)
        state = request_codec.decode(request_codec.encode(stream.state()))
        stream.abort()
        stream = SampleStream(made)
        stream.restore(state)
    batch = stream.rows(ended, META)
    made._host.close()
    return rows_of(batch), [batch.non_tensor_batch[name].tolist() for name in (PROMPT, "finish_reason")]


def test_a_sample_whose_environment_cannot_be_rebuilt_begins_once_more(folder: str, tmp_path: Path) -> None:
    turns = [3, 4, 5, 6]
    [(rows, (numbers, reasons))] = run_ranks(begun_once_more, 1, folder, str(tmp_path), turns)
    assert sorted(numbers) == [0, 1, 2, 3] and "stop" in reasons
    for number, reason, (_, response, is_sampled, _) in zip(numbers, reasons, rows, strict=True):
        if reason == "stop":
            seen = json.loads((tmp_path / f"{number}.json").read_text())
            assert [token for turn in seen for token in turn] == [
                token for token, own in zip(response, is_sampled, strict=True) if own
            ]


def test_a_stream_that_another_takes_over_is_one_that_goes_on(folder: str) -> None:
    turns = [1, 3, 2, 5, 4, 8, 2, 1]
    [[(whole, keys), (taken_over, moved_keys)]] = run_ranks(moved, 1, folder, turns)
    assert [row[:3] for row in taken_over] == [row[:3] for row in whole]
    assert moved_keys == keys
    for row, other in zip(whole, taken_over, strict=True):
        torch.testing.assert_close(row[3], other[3], atol=1e-4, rtol=0)
