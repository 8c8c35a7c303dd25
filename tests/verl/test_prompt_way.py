"""The way of one row through a step, as docs/life_of_a_step.md has it: from the parquet file to the update."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mindspeed_llm.tiny import tiny_hf_config
from tests.pages import ROOT
from tests.parallel.launcher import run_ranks
from tests.parallel.test_grpo_step import config_overrides
from tests.tools.plan.test_whole_step import ONE_STEP, write_inputs
from tests.way_tracing import traced
from verl.protocol import DataProto
from verl.row_refs import RowRefs
from verl.single_controller.base import WorkerGroup
from verl.single_controller.base.worker_group import PendingCall
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.trainer.config.override_text import override
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward_process import make_reward_fn
from verl.trainer.ppo.saved_rollouts import GENERATED_ROW
from verl.trainer.ppo.schedules.generation import prompt_rows
from verl.trainer.ppo.step_functions import compute_advantage
from verl.utils.dataset import RLHFDataset
from verl.utils.megatron.packed_batch import PackedMicroBatch, pack_micro_batch
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.actor import MegatronPPOActor
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.reward_manager.pooled import PendingScores, PooledRewardManager
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.row_store import RowStore
from verl.workers.weight_sync.rollout_mode import RolloutMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.sample.sampler import SamplerOutput
from vllm.v1.worker.worker import Worker

PAGE = ROOT / "docs" / "life_of_a_step.md"


class OneProcess(WorkerGroup):
    """One rank, in this process."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__("ranks", ActorRolloutRefWorker, 1)
        self.worker = ActorRolloutRefWorker(config, "actor_rollout")
        self.worker.init_model()

    def run(self, method: str, per_rank: list[tuple[tuple, dict[str, Any]]], **_: Any) -> PendingCall:
        args, kwargs = per_rank[0]
        outputs = [getattr(self.worker, method)(*args, **kwargs)]
        return PendingCall(lambda: outputs, is_done=lambda: True)

    def shutdown(self) -> None:
        self.worker.row_store.close()


def step_config(root: Path) -> PPOTrainerConfig:
    config = load_config(
        [
            *config_overrides(str(root / "model"), 1),
            *ONE_STEP,
            "actor_rollout_ref.actor.use_kl_loss=False",
            override("data.train_files", root / "data.parquet"),
            override("data.val_files", root / "data.parquet"),
            override("custom_reward_function.path", Path(__file__).with_name("rewards_by_length.py")),
            override("trainer.report_dir", root),
            override("trainer.default_local_dir", root / "checkpoints"),
        ]
    )
    assert validate_config(config) == []
    return config


# What a step makes beside the row: no instance of these holds it, points at it or describes it, unless it is graded.
BESIDE = {
    "Mesh": "which ranks a call goes to",
    "PendingCall": "a call of the controller, whatever it is about",
    "_Phase": "what the watchdog knows of a call",
    "ParallelLayout": "the layout of the ranks",
    "StepLimits": "where a generation is cut",
    "RowTokens": "how many tokens the rows of a micro-batch take",
    "StepExchange": "how many tokens each replica computes",
    "Step": "what observers of the trainer are shown",
    # A response as text has a way of its own: to a grader's process and back.
    "PendingScores": "grades that are being computed",
    "ScoringResult": "a grade",
    "GradedSample": "a line of the ledger",
    "Seen": "a graded sample of which the signs of not learning are made",
    "Scores": "grades of a batch",
}
MOST_CLASSES = 7


class Hops:
    """The table of the page: what the first sample of the first prompt is at each hop."""

    def __init__(self) -> None:
        self._cells: dict[str, str] = {}
        self._row = 0  # of the sample in the balanced batch
        self.watched = {
            RLHFDataset.__getitem__: self._item,
            prompt_rows: self._rows,
            vLLMRollout.request: self._request,
            Scheduler.schedule: self._step,
            Worker.execute: self._sampled,
            vLLMRollout.to_batch: self._generated,
            RowStore.store_generated: self._stored,
            compute_advantage: self._advantage,
            RowStore.fetch: self._fetched,
            pack_micro_batch: self._packed,
        }

    def table(self) -> list[str]:
        lines = [f"| `{_place(function)}` | {self._cells[function.__qualname__]} |" for function in self.watched]
        return ["| after | class | the row |", "|---|---|---|", *lines]

    def _add(self, function: Any, kind: str, value: str) -> None:
        self._cells.setdefault(function.__qualname__, f"{kind} | {value}")

    def _item(self, item: dict[str, Any]) -> None:
        self._add(RLHFDataset.__getitem__, "dict", f"`raw_prompt_ids` {item['raw_prompt_ids']}, ints")

    def _rows(self, batch: DataProto) -> None:
        columns = batch.non_tensor_batch
        shown = f"row 0 of {len(batch)}: `raw_prompt_ids`, `uid` {columns['uid'][0]!r}, `sampling_seeds`"
        self._add(prompt_rows, "DataProto", shown)

    def _request(self, request: Request) -> None:
        shown = (
            f"`request_id` {request.request_id!r}, `token_ids` {request.token_ids}, `max_tokens` {request.max_tokens}"
        )
        self._add(vLLMRollout.request, "Request", shown)

    def _step(self, step: SchedulerOutput) -> None:
        shown = f"`requests[0]` computes `num_tokens[0]` = {step.num_tokens[0]}"
        self._add(Scheduler.schedule, "SchedulerOutput", shown)

    def _sampled(self, output: SamplerOutput) -> None:
        shown = (
            f"`token_ids[0]` {output.token_ids[0]}, {output.token_ids.dtype}; `logprobs[0]` {output.logprobs[0]:.2f}"
        )
        self._add(Worker.execute, "SamplerOutput", f"{shown}, appended to the Request")

    def _generated(self, batch: DataProto) -> None:
        self._add(vLLMRollout.to_batch, "DataProto", _shown(batch, "responses", 0))

    def _stored(self, batch: DataProto) -> None:
        assert batch.row_refs is not None
        place = batch.row_refs.columns["input_ids"]
        shown = f"{_shown(batch, 'responses', 0)}; `input_ids` at batch, rank, slot {place[0].tolist()}, {place.dtype}"
        self._add(RowStore.store_generated, "DataProto with RowRefs", shown)

    def _advantage(self, batch: DataProto) -> None:
        self._row = batch.batch[GENERATED_ROW].tolist().index(0)
        shown = f"{_shown(batch, 'token_level_scores', self._row)}; {_shown(batch, 'advantages', self._row)}"
        self._add(compute_advantage, "DataProto", shown)

    def _fetched(self, batch: DataProto) -> None:
        if "advantages" in batch.batch:
            shown = _shown(batch, "input_ids", self._row)
            self._add(RowStore.fetch, "RowsRequest to the owner, DataProto back", shown)

    def _packed(self, micro: PackedMicroBatch) -> None:
        is_update = RowStore.fetch.__qualname__ in self._cells
        if is_update and self._row in micro.token_rows_N:
            tokens = micro.input_ids_T[micro.token_positions_N[micro.token_rows_N == self._row]]
            shown = f"{len(tokens)} of `input_ids_T`'s {micro.num_tokens}, without padding"
            self._add(pack_micro_batch, "PackedMicroBatch", shown)


def _place(function: Any) -> str:
    return f"{function.__module__.replace('.', '/')}.py:{function.__qualname__}"


def _shown(batch: DataProto, name: str, row: int) -> str:
    values = batch.batch[name][row]
    numbers = [round(value, 2) for value in values.tolist()]
    return f"`{name}` {numbers}, {str(values.dtype).removeprefix('torch.')}"


def carries(value: Any) -> bool:
    """Whether a container has rows in it: as batches, requests or references, or as the lists of their tokens."""
    if isinstance(value, np.ndarray):
        return value.dtype == object and carries(value.tolist())
    if isinstance(value, dict):
        return "raw_prompt_ids" in value or any(map(carries, value.values()))
    return isinstance(value, DataProto | Request | RowRefs) or (
        isinstance(value, list | tuple) and any(map(carries, value))
    )


def a_step(root: str) -> tuple[dict[str, str], list[str]]:
    """(the classes on the way, each with the function that had it first; the lines of the table) of a step here."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    config, hops = step_config(Path(root)), Hops()
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    reward_fn = make_reward_fn(config, tokenizer)
    trainer = RayPPOTrainer(config, tokenizer, ActorRolloutRefWorker, reward_fn)
    trainer.workers = OneProcess(config)
    trainer.use_workers()
    one_hop = (
        RolloutMode.__enter__,
        RolloutMode.__exit__,
        Worker.execute,
        MegatronPPOActor.compute_log_prob,
        MegatronPPOActor.update_policy,
        PooledRewardManager.start,
        PendingScores.result,
    )
    try:
        with traced(RLHFDataset.__getitem__, RowStore.fetch, carries, skipped=one_hop, watched=hops.watched) as way:
            trainer.fit()
    finally:
        trainer.shutdown()
        reward_fn.close()
    return {kind.__name__: where for kind, where in way.classes.items()}, hops.table()


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[str]]:
    root = write_inputs(tmp_path_factory.mktemp("inputs"), tiny_hf_config())
    [result] = run_ranks(a_step, 1, str(root))
    return result


def test_a_row_is_few_classes_between_the_data_set_and_the_update(step: tuple[dict[str, str], list[str]]) -> None:
    on_the_way = {name: where for name, where in step[0].items() if name not in BESIDE}
    assert on_the_way.keys() >= {"dict", "DataProto", "Request", "SchedulerOutput", "SamplerOutput", "RowRefs"}
    assert len(on_the_way) <= MOST_CLASSES, on_the_way
    assert BESIDE.keys() <= step[0].keys(), "what is no longer made need not be left out"


def test_the_page_has_the_row_of_a_real_run(step: tuple[dict[str, str], list[str]]) -> None:
    table = "\n".join(step[1])
    assert table in PAGE.read_text(encoding="utf-8"), f"the page should have\n{table}"
