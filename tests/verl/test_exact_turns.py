"""Whatever happens to a sample of several turns, training sees the tokens that the engine was given and sampled and the
experts that it chose, and computes its log-probs bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_formats.config import load_hf_config
from megatron.core import parallel_state
from tests.parallel.launcher import run_ranks
from tests.verl.test_exact_mode import ROLLOUT_OPS, differences, make_actor
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from verl.experimental.agent_loop.environment import EnvironmentSpec
from verl.experimental.agent_loop.host import HostSettings
from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.utils.dataset.prompt_items import ENVIRONMENT_ROW
from verl.utils.megatron.packed_batch import pack_micro_batch
from verl.workers.config import RolloutConfig
from verl.workers.config.multi_turn import MultiTurnConfig
from verl.workers.rollout.rollout_messages import ENVIRONMENT_SEED, PROMPT, SAMPLE
from verl.workers.rollout.trajectory import Trajectory
from verl.workers.rollout.vllm_rollout.sample_stream import SampleStream
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from vllm.v1.engine import request_codec
from vllm.v1.request import Request

LETTERS = "abcdefghijklmn"
# Old answers of an odd length lose their first letter, as others lose their thoughts.
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role[0] if m.role == 'assistant' else 'b' }}"
    "{{ m.content[1:] if m.role == 'assistant' and m.content|length % 2 else m.content }}"
    "{{ '<eos>' if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<bos>a{% endif %}"
)
CHATS = '''
import random

class Chat:
    """Answers in letters, as often as its row says."""

    takes_token_ids = True

    async def reset(self, row, seed):
        self.random, self.left, self.is_chat = random.Random(seed), row["turns"], row["is_chat"]
        first = self.text()
        return [{"role": "user", "content": first}] if self.is_chat else [2 + ord(letter) - 97 for letter in first]

    async def step(self, action):
        self.left -= 1
        text = self.text()
        return (text if self.is_chat else [2 + ord(letter) - 97 for letter in text]), 0.5, self.left == 0

    def text(self):
        return "".join(self.random.choice("abcdefghijklmn") for _ in range(self.random.randint(1, 5)))
'''
META = {"eos_token_id": 1, "pad_token_id": 0, "temperature": 1.0}
CONFIG = TINY | {"vocab_size": 2 + len(LETTERS), "torch_dtype": "float32"}
SAMPLES = 8  # of an example, on each of two engines
RESPONSE = 160


@dataclass(frozen=True)
class Event:
    """After so many steps of the engine, what happens to the samples under way."""

    steps: int
    kind: str


EVENTS = st.lists(
    st.builds(Event, st.integers(1, 12), st.sampled_from(["weights", "withdrawn", "kept", "taken over"])),
    min_size=2,
    max_size=6,
)
CHATS_OF_SAMPLES = st.lists(st.booleans(), min_size=SAMPLES, max_size=SAMPLES)
TURNS_OF_SAMPLES = st.lists(st.integers(1, 8), min_size=SAMPLES, max_size=SAMPLES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("chats")
    for seed in (0, 1):
        write_checkpoint(path / str(seed), seed, **CONFIG)
    write_checkpoint(path, 0, **CONFIG)
    vocabulary = {"<bos>": 0, "<eos>": 1} | {letter: 2 + index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    ).save_pretrained(path)
    (path / "chats.py").write_text(CHATS)
    return str(path)


def prompts(turns: list[int], is_chat: list[bool], first_seed: int) -> DataProto:
    columns = {
        "raw_prompt_ids": [[2]] * SAMPLES,
        "sampling_seeds": [first_seed + number for number in range(SAMPLES)],
        "response_limit": [0] * SAMPLES,
        ENVIRONMENT_ROW: [{"turns": number, "is_chat": chat} for number, chat in zip(turns, is_chat, strict=True)],
        ENVIRONMENT_SEED: [first_seed + number // 2 for number in range(SAMPLES)],
        PROMPT: [number // 2 for number in range(SAMPLES)],
        SAMPLE: [number % 2 for number in range(SAMPLES)],
    }
    return DataProto.from_dict(non_tensors={name: as_rows(rows) for name, rows in columns.items()}, meta_info=META)


class Engines:
    """A rollout engine and, for each version of its weights, an actor, on every rank; what its samples were given."""

    def __init__(self, folder: str, drafts: dict[str, Any]) -> None:
        groups = parallel_state.initialize_model_parallel()
        turns = MultiTurnConfig(enable=True)
        sizes = {"prompt_length": 24, "response_length": RESPONSE, "block_size": 4, "max_num_seqs": 6}
        shared = {"multi_turn": turns, "enforce_eager": True, "dtype": "float32", "expert_exchange": "dispatch"}
        shared |= {"enable_rollout_routing_replay": True, "speculative_config": drafts}
        # 70 blocks are less than six samples of 184 tokens need: some are preempted.
        config = RolloutConfig(num_gpu_blocks_override=70, **sizes, **shared)
        self.rollout = vLLMRollout(
            config,
            folder,
            rollout_ops=ROLLOUT_OPS,
            device=torch.device("cpu"),
            environments=HostSettings(folder, EnvironmentSpec(f"{folder}/chats.py", "Chat"), format=None),
        )
        self.rollout.resume(["weights", "kv_cache"])
        self.llm = self.rollout.inference_engine
        hf = load_hf_config(folder)
        assert hf.vocab_size == CONFIG["vocab_size"]
        self.weights = [random_weights(CONFIG, seed) for seed in (0, 1)]
        self.actors = [make_actor(f"{folder}/{seed}", groups, torch.float32) for seed in (0, 1)]
        self.llm.update_weights(self.weights[0].items(), version=0)
        self.given: dict[tuple[str, int], list[int]] = {}
        self.chosen: dict[tuple[str, int], np.ndarray] = {}
        self._next_turn = self.rollout._next_turn
        self.rollout._next_turn = self._seen  # type: ignore[method-assign]

    def _seen(self, sample: Trajectory, meta_info: dict[str, Any]) -> Any:
        request = self._next_turn(sample, meta_info)
        self.given[sample.request_id, len(sample.spans)] = list(request.token_ids)
        return request

    def _stream(self) -> SampleStream:
        stream = SampleStream(self.rollout)
        assert stream._turns is not None
        take = stream._turns.take

        def seen(finished: Sequence[Request]) -> list[Request]:
            for request in finished:
                sample, _, turn = request.request_id.rpartition(".")
                assert request.routed_experts is not None
                self.chosen[sample, int(turn)] = request.routed_experts
            return take(finished)

        stream._turns.take = seen  # type: ignore[method-assign]
        return stream

    def run(self, given: DataProto, events: list[Event]) -> list[Trajectory]:
        stream = self._stream()
        stream.start(given)
        ended = []
        for event in [*events, Event(100_000, "none")]:
            ended += stream.run(event.steps, META)
            if event.kind in ("withdrawn", "kept", "weights"):
                stream.withdraw(keeps_cache=event.kind == "kept")
            if event.kind == "weights":
                version = self.llm.policy_version + 1
                self.llm.update_weights(self.weights[version % 2].items(), version=version)
            if event.kind == "taken over":
                state = request_codec.decode(request_codec.encode(stream.state()))
                stream.abort()
                stream = self._stream()
                stream.restore(state)
        self.batch = stream.rows(ended, META)
        self.batch.meta_info |= META
        return ended


def contexts(batch: DataProto) -> dict[tuple[int, int], tuple[list[int], int, list[Any]]]:
    """Of each scored (row, column) the tokens that training computes before it, the token, and the experts that R3
    replays for the last token before it.
    """
    given = (batch.batch[name] for name in ("input_ids", "attention_mask", "response_mask"))
    starts_BR = batch.batch["row_starts"]
    micro = pack_micro_batch(*given, range(len(batch)), 1, row_starts_BR=starts_BR)
    begins = micro.packed_seq_params.cu_seqlens.tolist()
    tokens = (part.tolist() for part in (micro.token_positions_N, micro.token_rows_N, micro.token_cols_N))
    columns = {position: (row, col) for position, row, col in zip(*tokens, strict=True)}
    found = {}
    for row, col, position, label in zip(
        *(values.tolist() for values in (micro.rows_S, micro.cols_S, micro.positions_S, micro.labels_S)), strict=True
    ):
        begin = max(start for start in begins if start <= position)
        experts = batch.batch["routed_experts"][columns[position]].tolist()
        found[row, col] = micro.input_ids_T[begin : position + 1].tolist(), label, experts
    return found


def check(engines: Engines, ended: list[Trajectory]) -> None:
    batch = engines.batch
    assert len(batch) == SAMPLES
    trained = contexts(batch)
    for row, sample in enumerate(ended):
        assert sample.finish_reason in ("stop", "length"), (sample.finish_reason, sample.problem)
        sampled = batch.batch["response_mask"][row].nonzero().flatten().tolist()
        assert [col for number, col in sorted(trained) if number == row] == sampled
        assert sampled == [col for begin, end in sample.spans for col in range(begin, end)]
        for turn, (begin, end) in enumerate(sample.spans):
            context = engines.given[sample.request_id, turn]
            for col in range(begin, end):
                experts = engines.chosen[sample.request_id, turn][len(context) - 1].tolist()
                assert trained[row, col] == (context, int(batch.batch["responses"][row, col]), experts)
                context = [*context, trained[row, col][1]]
    versions = torch.zeros_like(batch.batch["response_mask"])
    for row, sample in enumerate(ended):
        versions[row, batch.batch["response_mask"][row].bool()] = torch.tensor(sample.policy_versions()) % 2
    scored = [actor.compute_log_prob(batch, max_token_len=600) for actor in engines.actors]
    assert scored[0] is not None and scored[1] is not None
    assert differences(batch, torch.where(versions == 0, scored[0], scored[1])) == 0.0


def any_trajectories(folder: str, num_examples: int, drafts: dict[str, Any]) -> dict[str, int]:
    engines, seen = Engines(folder, drafts), {"samples": 0, "turns": 0, "new rows": 0, "versions": 0, "right drafts": 0}

    @settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(TURNS_OF_SAMPLES, CHATS_OF_SAMPLES, EVENTS, st.integers(0, 10_000))
    def run(turns: list[int], is_chat: list[bool], events: list[Event], seed: int) -> None:
        ended = engines.run(prompts(turns, is_chat, 100_000 * dist.get_rank() + seed), events)
        check(engines, ended)
        seen["samples"] += len(ended)
        seen["turns"] += sum(len(sample.spans) for sample in ended)
        seen["new rows"] += sum(len(sample.row_starts) for sample in ended)
        seen["versions"] += sum(len(set(sample.policy_versions())) > 1 for sample in ended)
        seen["right drafts"] += sum(sample.draft_counts[2] for sample in ended)

    run()
    seen["preemptions"] = engines.llm.core.scheduler.num_preemptions
    assert engines.rollout._host is not None
    engines.rollout._host.close()
    return seen


@pytest.mark.parametrize(
    "drafts",
    [pytest.param({}, marks=pytest.mark.slow), {"method": "suffix", "num_speculative_tokens": 3}],
    ids=["drawn", "drafted"],
)
@pytest.mark.parametrize("num_examples", [2, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_any_trajectories_are_trained_on_as_they_were_generated(
    folder: str, num_examples: int, drafts: dict[str, Any]
) -> None:
    found = run_ranks(any_trajectories, 2, folder, num_examples, drafts, timeout_s=880)
    print(json.dumps(found))
    assert all(rank["samples"] == SAMPLES * num_examples for rank in found)
    is_small = num_examples < 10
    for rank in found:
        assert rank["turns"] > (1 if is_small else 2) * rank["samples"] and (rank["preemptions"] > 0 or is_small)
        assert (rank["right drafts"] > 0) == bool(drafts)
        assert rank["new rows"] > (2 if is_small else 3) * num_examples and rank["versions"] > num_examples
