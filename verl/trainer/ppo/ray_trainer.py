"""The single controller: one GRPO step, and the loop with validation and checkpoints around it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.single_controller.base import get_together
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.data import file_list, val_sets
from verl.trainer.ppo import checkpointing
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_kl_controller, kl_penalty
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_reward_metrics,
    compute_sample_metrics,
    compute_set_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    marked_timer,
    process_validation_metrics,
)
from verl.trainer.ppo.reward_ledger import RewardLedger
from verl.trainer.ppo.rollout_records import FOLDER, RolloutRecord, RolloutRecords, recorded_rows
from verl.trainer.ppo.sample_records import ROLLOUT, TRAINING, SampleRecords
from verl.trainer.ppo.schedules.asynchronous import AsynchronousSource
from verl.trainer.ppo.schedules.generation import Tokens
from verl.trainer.ppo.schedules.recorded import RecordedSource
from verl.trainer.ppo.schedules.synchronous import SynchronousSource
from verl.trainer.ppo.scores import add_scores, reward_parts
from verl.trainer.ppo.seeds import sampling_seeds
from verl.trainer.ppo.step_timeline import StepTimeline
from verl.utils.dataset import ResumableLoader, RLHFDataset, collate_fn
from verl.utils.device import resolve_device
from verl.utils.op_tables import op_tables_text
from verl.utils.seqlen_balancing import dealt_order
from verl.utils.tracking import Tracking
from verl.workers.reward_manager import NaiveRewardManager, Scores
from verl.workers.row_store import worker_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_VALIDATION_STREAM = -1  # sampling stream of validation: the same noise at every step, so that scores compare


def apply_kl_penalty(data: DataProto, kl_coef: float, kind: str) -> tuple[DataProto, float]:
    """token_level_rewards = scores - kl_coef * KL per token; also the mean KL over response tokens."""
    mask = data.batch["response_mask"].float()
    kl = kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kind) * mask
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - kl_coef * kl
    return data, float(kl.sum() / mask.sum().clamp(min=1))


def compute_advantage(data: DataProto, config: PPOTrainerConfig) -> DataProto:
    """Adds ``advantages`` and ``returns`` [B, R]; a pure function of the rewards and the prompt groups."""
    algorithm = config.algorithm
    estimate = get_adv_estimator_fn(algorithm.adv_estimator)
    advantages, returns = estimate(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"].float(),
        index=data.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
    )
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    return data


class RayPPOTrainer:
    """Drives the workers through training.

    Args:
        config: the whole tree; ``trainer.total_training_steps`` may be absent, then it follows from the epochs.
        worker_class: what runs in every worker process that trains.
        rollout_class: what runs in those that only generate, where ``trainer.schedule`` has such.
        run_metrics: of the run around this trainer; logged with every step.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        worker_class: type,
        reward_fn: NaiveRewardManager,
        rollout_class: type | None = None,
        run_metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.worker_class, self.rollout_class = worker_class, rollout_class
        self.reward_fn = reward_fn
        self.run_metrics = dict(run_metrics or {})
        self.reward_ledger = RewardLedger(config.trainer.report_dir, config.reward_model.ledger)
        self.timeline = StepTimeline(config.trainer.report_dir, config.trainer.timeline_freq)
        self.sample_records = SampleRecords(
            config.trainer.report_dir, config.trainer.log_samples_freq, config.trainer.log_samples_rows, tokenizer
        )
        data = config.data
        self.train_dataset = _dataset(config, tokenizer, file_list(data.train_files), data.train_max_samples)
        self.val_datasets = {
            name: _dataset(config, tokenizer, files, data.val_max_samples)
            for name, files in val_sets(data.val_files).items()
        }
        self.train_loader = ResumableLoader(
            self.train_dataset, config.gen_batch_size, shuffle=data.shuffle, seed=data.seed or 0
        )
        per_epochs = len(self.train_dataset) // data.train_batch_size * config.trainer.total_epochs
        self.total_training_steps = config.trainer.total_training_steps or per_epochs
        folder = config.trainer.train_only or Path(config.trainer.report_dir) / FOLDER
        self.rollout_records = RolloutRecords(Path(folder).expanduser())
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.global_step = 0
        self.workers: Any = None  # those that train
        self.rollout_workers: Any = None  # those that only generate
        self.tracking: Any = None
        self._carried_timing: dict[str, float] = {}
        self._unpublished: checkpointing.Checkpoint | None = None

    def init_workers(self) -> None:
        """Starts one process per device and builds the models in it."""
        trainer, rollout = self.config.trainer, self.config.rollout
        role = "actor" if self.config.has_rollout_ranks else "actor_rollout"
        role += "_ref" if self.config.use_reference_policy else ""
        num_later = self.config.num_devices - trainer.world_size
        self.workers = self._start(self.worker_class, role, trainer.nnodes, trainer.n_gpus_per_node, None, num_later)
        if self.rollout_class is not None:
            self.rollout_workers = self._start(
                self.rollout_class, "rollout", rollout.nnodes, rollout.n_gpus_per_node, self.workers, 0
            )
        tables = get_together(*(group.start("init_model") for group in self._groups()))[0][0]
        if tables:
            logger.info("on %s\n%s", resolve_device(trainer.device), op_tables_text(tables))
        self.source = self._make_source()

    def _start(
        self, worker_class: type, role: str, num_nodes: int, per_node: int, joins: Any, num_later_ranks: int
    ) -> RayWorkerGroup:
        return RayWorkerGroup(
            RayResourcePool(process_on_nodes=[per_node] * num_nodes),
            RayClassWithInitArgs(worker_class, config=self.config, role=role),
            device_name=resolve_device(self.config.trainer.device),
            num_cpus_per_worker=self.config.ray_kwargs.num_cpus_per_worker,
            timeout_s=self.config.trainer.worker_timeout_s,
            start_timeout_s=self.config.trainer.start_timeout_s,
            num_later_ranks=num_later_ranks,
            joins=joins,
        )

    def _make_source(self) -> SynchronousSource | AsynchronousSource | RecordedSource:
        """Where the samples of the steps come from, by ``trainer.schedule`` and ``trainer.train_only``."""
        if self.config.trainer.train_only is not None:
            return RecordedSource(self.config, self.train_loader, self.rollout_records, self.workers)
        tokens = Tokens(self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        if self.config.has_rollout_ranks:
            return AsynchronousSource(self.config, self.train_loader, tokens, self.workers, self.rollout_workers)

        def score(batch: DataProto) -> None:
            self._take_scores(batch, self.reward_fn.start(batch).result())

        return SynchronousSource(self.config, self.train_loader, tokens, self.workers, score)

    def fit(self) -> None:
        """Resumes, validates, trains to ``total_training_steps``, saving and validating on the way."""
        self._load_checkpoint()
        trainer = self.config.trainer
        self.tracking = Tracking(trainer.report_dir, trainer.logger, first_step=self._first_logged_step())
        self.reward_ledger.cut_back(self._first_logged_step())
        self.timeline.cut_back(self._first_logged_step())
        self.sample_records.cut_back(self._first_logged_step())
        if trainer.records_rollouts:
            self.rollout_records.cut_back(self._first_logged_step())
        if self.global_step == 0 and trainer.tests_first:
            self.tracking.log(self._validate(), step=0)
        while self.global_step < self.total_training_steps:
            self.global_step += 1
            self.timeline.begin(self.global_step, *self._groups())
            metrics = self._rollout_step() if trainer.rollout_only else self._train_step()
            self._publish_checkpoint(is_needed=False)
            is_last = self.global_step == self.total_training_steps
            if trainer.tests_after(self.global_step, is_last=is_last):
                metrics |= self._validate()
            self.tracking.log(metrics | self.run_metrics | self._take_carried_timing(), step=self.global_step)
            if trainer.saves_after(self.global_step, is_last=is_last):
                self._save_checkpoint()
            self.timeline.end(*self._groups())
        self._publish_checkpoint(is_needed=True)
        self.tracking.close()
        if trainer.export_hf and not trainer.rollout_only:
            path = str(Path(trainer.report_dir) / "export_hf")
            self.workers.export_hf(path)
            logger.info("the trained model is in %s", path)

    def shutdown(self) -> None:
        """Ends every worker process and closes the files of metrics."""
        for group in self._groups():
            group.shutdown()
        if self.tracking is not None:
            self.tracking.close()

    def _groups(self) -> list[Any]:
        """The worker groups that have been started, in the order of their ranks."""
        return [group for group in (self.workers, self.rollout_workers) if group is not None]

    def _train_step(self) -> dict[str, float]:
        """One GRPO step: samples, their scores, log-probs, advantages, update."""
        timing = self.timeline.phase_seconds()
        metrics: dict[str, float] = {
            "training/global_step": self.global_step,
            "training/epoch": self.source.epoch,
        }
        with marked_timer("step", timing):
            batch, of_source = self.source.next_batch(self.global_step, timing)
            metrics |= of_source
            order = self._dealt_order(batch)
            batch.reorder(order)
            batch.meta_info |= self._update_info()
            # Runs in its own processes while log-probs are computed; filtered groups were chosen by their scores.
            scoring = None if "token_level_scores" in batch.batch else self.reward_fn.start(batch)
            if self.config.needs_old_log_prob:
                with marked_timer("old_log_prob", timing):
                    batch = batch.union(self.workers.compute_log_prob(worker_batch(batch)))
            if self.config.use_reference_policy:
                with marked_timer("ref", timing):
                    batch = batch.union(self.workers.compute_ref_log_prob(worker_batch(batch)))
            with marked_timer("reward", timing):
                if scoring is not None:
                    self._take_scores(batch, scoring.result())
                self.reward_ledger.write(self.global_step)
                metrics |= compute_reward_metrics(reward_parts(batch), "reward")
            if self.config.trainer.save_rollouts:
                with marked_timer("save_rollouts", timing):
                    self._record_rollouts(batch, order, of_source)
            with marked_timer("adv", timing):
                metrics |= self._apply_kl(batch)
                batch = compute_advantage(batch, self.config)
            if self.sample_records.wants(self.global_step):
                with marked_timer("log_samples", timing):
                    self._record_samples(batch)
            with marked_timer("update_actor", timing):
                metrics |= self.workers.update_actor(worker_batch(batch, "advantages")).meta_info["metrics"]
        metrics |= compute_data_metrics(batch) | compute_timing_metrics(batch, timing)
        return metrics | compute_throughout_metrics(batch, timing, self.config.num_devices)

    def _rollout_step(self) -> dict[str, float]:
        """The first half of a step: samples and their scores, which are recorded and not trained on."""
        timing = self.timeline.phase_seconds()
        metrics: dict[str, float] = {
            "training/global_step": self.global_step,
            "training/epoch": self.source.epoch,
        }
        with marked_timer("step", timing):
            batch, of_source = self.source.next_batch(self.global_step, timing)
            with marked_timer("reward", timing):
                if "token_level_scores" not in batch.batch:
                    self._take_scores(batch, self.reward_fn.start(batch).result())
                self.reward_ledger.write(self.global_step)
                metrics |= of_source | compute_reward_metrics(reward_parts(batch), "reward")
            with marked_timer("save_rollouts", timing):
                self._record_rollouts(batch, list(range(len(batch))), of_source)
        metrics |= compute_sample_metrics(batch) | compute_timing_metrics(batch, timing)
        return metrics | compute_throughout_metrics(batch, timing, self.config.num_devices)

    def _record_rollouts(self, batch: DataProto, dealt_order: list[int], metrics: dict[str, float]) -> None:
        rows = recorded_rows(self.workers, batch, dealt_order)
        state, _ = self.source.state()
        self.rollout_records.write(self.global_step, RolloutRecord(rows, metrics, state["loader"]))

    def _take_scores(self, batch: DataProto, scores: Scores) -> None:
        """Scores into ``batch``, grades into the ledger."""
        self.reward_ledger.add(scores.samples)
        add_scores(batch, scores, self.config.reward_model.overlong_buffer)

    def _dealt_order(self, batch: DataProto) -> list[int]:
        """Rows so that every data-parallel rank gets its share, by length, of the rows of each mini-batch."""
        models, num_ranks = self.config.actor_rollout_ref, self.config.training_layout.data_parallel_size
        return dealt_order(
            batch.batch["num_tokens"].tolist(),
            num_ranks,
            models.actor.ppo_mini_batch_size * models.rollout.n,
            balance=self.config.trainer.balance_batch,
            shuffle_seed=models.actor.shuffle_seed(self.global_step) if models.actor.shuffle else None,
        )

    def _update_info(self) -> dict[str, Any]:
        rollout = self.config.actor_rollout_ref.rollout
        return {"temperature": rollout.temperature, "rollout_n": rollout.n, "global_step": self.global_step}

    def _apply_kl(self, batch: DataProto) -> dict[str, float]:
        if not self.config.algorithm.use_kl_in_reward:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            return {}
        _, kl = apply_kl_penalty(batch, self.kl_ctrl.value, self.config.algorithm.kl_penalty)
        used = self.kl_ctrl.value
        self.kl_ctrl.update(kl, n_steps=len(batch))
        return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": used}

    def _record_samples(self, batch: DataProto) -> None:
        """Some rows with both log-probs, before the update; those of training are computed where the step has none."""
        if batch.row_refs is None:
            self.sample_records.write(self.global_step, self.sample_records.chosen(batch))
            return
        if TRAINING not in batch.row_refs:  # into another batch: the update must not find them
            computed = self.workers.compute_log_prob(worker_batch(batch))
            batch = batch.select().union(computed)
        rows = self.sample_records.chosen(batch)
        kept = self.workers.fetch_columns(worker_batch(rows), (ROLLOUT, TRAINING))
        rows.batch.update(kept.batch)
        self.sample_records.write(self.global_step, rows)

    def _validate(self) -> dict[str, float]:
        """Mean scores over the validation problems of all sets and of each that has a name.

        Transcripts go to ``val_generations/step_N.jsonl``.
        """
        timing = self.timeline.phase_seconds()
        config = self.config
        n = config.actor_rollout_ref.rollout.val_kwargs.n
        outputs, pending = [], []
        with marked_timer("testing", timing):
            for name, dataset in self.val_datasets.items():
                for batch in self._validation_batches(dataset, n):
                    batch.non_tensor_batch["val_set"] = np.array([name] * len(batch), dtype=object)
                    outputs.append(batch)
                    pending.append(self.reward_fn.start(batch))
            scores = [item.result() for item in pending]
        parts = _joined_parts(scores)
        for item in scores:
            self.reward_ledger.add(item.samples)
        self.reward_ledger.write(self.global_step, is_validation=True)
        self._write_generations(outputs, [text for s in scores for text in s.responses], parts)
        sources, sets = (
            np.concatenate([batch.non_tensor_batch[key] for batch in outputs]) for key in ("data_source", "val_set")
        )
        lengths = torch.cat([batch.batch["response_mask"].sum(-1) for batch in outputs])
        metrics = process_validation_metrics(sources, parts, lengths, n) | compute_set_metrics(sets, parts, lengths)
        return metrics | {"timing_s/testing": timing["testing"]}

    def _validation_batches(self, dataset: RLHFDataset, n: int) -> Iterator[DataProto]:
        """Every problem of a set n times with its responses; a set's noise does not depend on the other sets."""
        seed, size = self.config.actor_rollout_ref.rollout.seed, self.config.data.val_batch_size or len(dataset)
        for first in range(0, len(dataset), size):
            rows = range(first, min(first + size, len(dataset)))
            prompts = DataProto.from_single_dict(collate_fn([dataset[i] for i in rows])).repeat(n, interleave=True)
            seeds = sampling_seeds(seed, _VALIDATION_STREAM, first * n, len(prompts))
            prompts.non_tensor_batch["sampling_seeds"] = seeds
            yield prompts.union(self.source.generate(self.global_step, prompts))

    def _write_generations(self, outputs: list[DataProto], responses: list[str], parts: dict[str, np.ndarray]) -> None:
        limit = self.config.trainer.log_val_generations
        if not limit:
            return
        prompts = [text for batch in outputs for text in batch.non_tensor_batch["prompt_text"]]
        truths = [str(m["ground_truth"]) for batch in outputs for m in batch.non_tensor_batch["reward_model"]]
        sets = [name for batch in outputs for name in batch.non_tensor_batch["val_set"]]
        lines = []
        for row in _first_of_each(sets, limit):
            record = {
                "step": self.global_step,
                **({"set": sets[row]} if sets[row] else {}),
                "prompt": prompts[row],
                "response": responses[row],
                "ground_truth": truths[row],
                **{name: float(values[row]) for name, values in parts.items() if not np.isnan(values[row])},
            }
            lines.append(json.dumps(record, ensure_ascii=False))
        directory = Path(self.config.trainer.report_dir) / "val_generations"
        directory.mkdir(parents=True, exist_ok=True)
        checkpointing.write_text(directory / f"step_{self.global_step}.jsonl", "\n".join(lines) + "\n")

    def _save_checkpoint(self) -> None:
        """Trainer state, then the workers' part, then ``latest``: what ``latest`` names is always whole.

        With ``actor.checkpoint.async_save`` the workers return early, and ``latest`` follows when they are done.
        """
        timing = self.timeline.phase_seconds()
        root = self.config.trainer.default_local_dir
        checkpoint = checkpointing.checkpoint_at(root, self.global_step)
        with marked_timer("save_checkpoint", timing):
            self._publish_checkpoint(is_needed=True)
            state, arrays = self.source.state()
            checkpoint.write_state(state | {"kl_coef": self.kl_ctrl.value}, arrays)
            latest_path = checkpointing.latest_path(root).absolute()
            self.workers.save_checkpoint(
                str(checkpoint.actor.absolute()), global_step=self.global_step, latest_path=str(latest_path)
            )
            self._unpublished = checkpoint
            self._publish_checkpoint(is_needed=False)
        self._carried_timing = {"timing_s/save_checkpoint": timing["save_checkpoint"]}

    def _publish_checkpoint(self, is_needed: bool) -> None:
        """When the last checkpoint is whole: ``latest`` names it, older ones go; until then waits if ``is_needed``."""
        checkpoint = self._unpublished
        if checkpoint is None:
            return
        if not checkpoint.is_complete:
            if not is_needed:
                return
            self.workers.wait_for_checkpoint()
        trainer = self.config.trainer
        checkpointing.publish(
            trainer.default_local_dir, checkpoint, trainer.max_actor_ckpt_to_keep, trainer.keep_every_steps
        )
        self._unpublished = None

    def _load_checkpoint(self) -> None:
        """Continues from the newest complete checkpoint, or the one asked for; says which, or that there is none."""
        trainer = self.config.trainer
        if trainer.resume_mode == "disable":
            return
        if trainer.resume_mode == "resume_path":
            checkpoint = checkpointing.Checkpoint(Path(str(trainer.resume_from_path)))
            problems = self._problems_of(checkpoint) if checkpoint.is_complete else ["it is not complete"]
            if problems:
                raise ValueError(f"trainer.resume_from_path: {checkpoint.directory}: {'; '.join(problems)}")
        else:
            found = checkpointing.find_latest_ckpt_path(trainer.default_local_dir, self._problems_of)
            if found is None:
                logger.info("no checkpoint in %s: starting from the model's weights", trainer.default_local_dir)
                return
            checkpoint = found
        state, arrays = checkpoint.read_state()
        self.source.load_state(state, arrays, checkpoint.step)
        self.kl_ctrl.value = state["kl_coef"]
        self.workers.load_checkpoint(str(checkpoint.actor.absolute()))
        self.global_step = checkpoint.step
        logger.info("resumed after step %d from %s", self.global_step, checkpoint.directory)

    def _problems_of(self, checkpoint: checkpointing.Checkpoint) -> list[str]:
        """What the workers find missing or damaged in it."""
        found: list[str] = self.workers.verify_checkpoint(str(checkpoint.actor.absolute()))[0]
        return found

    def _first_logged_step(self) -> int:
        return self.global_step + 1 if self.global_step else 0

    def _take_carried_timing(self) -> dict[str, float]:
        """Seconds of the last save, which happened after its own step had been logged."""
        taken, self._carried_timing = self._carried_timing, {}
        return taken


def _first_of_each(names: list[str], limit: int) -> list[int]:
    """Rows of the first ``limit`` of every name."""
    return [
        row for name in dict.fromkeys(names) for row in [i for i, other in enumerate(names) if other == name][:limit]
    ]


def _joined_parts(scores: list[Scores]) -> dict[str, np.ndarray]:
    """Every part over all batches; NaN in a batch whose reward functions do not give it."""
    names = sorted({name for item in scores for name in item.parts})
    return {
        name: np.concatenate([item.parts.get(name, np.full(len(item.samples), np.nan)) for item in scores])
        for name in names
    }


def _dataset(
    config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, files: list[str], max_samples: int
) -> RLHFDataset:
    data = config.data
    return RLHFDataset(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        max_samples=max_samples,
    )
