"""The single controller: one GRPO step, and the loop with validation and checkpoints around it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_formats.cores import THREADS
from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.protocol import DataProto
from verl.single_controller.base import get_together
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.data import file_list, val_sets
from verl.trainer.ppo.filter_groups import group_filter
from verl.trainer.ppo.kl import get_kl_controller
from verl.trainer.ppo.learning import LearningObserver
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_rank_metrics,
    compute_reward_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    count_samples_above,
    marked_timer,
)
from verl.trainer.ppo.observers import Step, StepObserver
from verl.trainer.ppo.reward_ledger import RewardLedger
from verl.trainer.ppo.reward_process import PendingRewards, RegisteredRewardManager
from verl.trainer.ppo.run_changes import learning_settings
from verl.trainer.ppo.run_checkpoints import RunCheckpoints
from verl.trainer.ppo.sample_records import SampleRecords
from verl.trainer.ppo.saved_rollouts import FOLDER, GENERATED_ROW, RolloutSaver, SavedRollouts
from verl.trainer.ppo.schedules.asynchronous import AsynchronousSource
from verl.trainer.ppo.schedules.generation import Tokens
from verl.trainer.ppo.schedules.group_sampling import Grading
from verl.trainer.ppo.schedules.saved import SavedSource
from verl.trainer.ppo.schedules.synchronous import SynchronousSource
from verl.trainer.ppo.scores import add_scores, reward_parts
from verl.trainer.ppo.step_functions import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.step_profiles import StepProfiles
from verl.trainer.ppo.step_timeline import StepTimeline
from verl.trainer.ppo.stop_request import StopRequest, TrainingInterruptedError
from verl.trainer.ppo.ungraded import UngradedLimit
from verl.trainer.ppo.validation import Validator
from verl.utils.dataset import PromptItems, ResumableLoader
from verl.utils.dataset.creation import create_rl_dataset, create_rl_sampler
from verl.utils.device import op_tables_text, resolve_device
from verl.utils.masks import response_lengths
from verl.utils.partitions import balanced_order
from verl.utils.tracking import Tracking
from verl.workers.reward_manager import PendingScores, PooledRewardManager, Scores
from verl.workers.rollout.environment_host import agent_names
from verl.workers.row_store import worker_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class RayPPOTrainer:
    """Drives the workers through training.

    Args:
        config: the whole tree; ``trainer.total_training_steps`` may be absent and then follows from the epochs.
        worker_class: the class of the worker processes that train.
        rollout_class: the class of those that only generate, where ``trainer.schedule`` has such.
        run_metrics: metrics of the run around this trainer; they are logged with every step.
        stop_request: whether somebody asked training to stop at the next step boundary.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        worker_class: type,
        reward_fn: PooledRewardManager | RegisteredRewardManager,
        rollout_class: type | None = None,
        run_metrics: Mapping[str, float] | None = None,
        stop_request: StopRequest | None = None,
    ) -> None:
        self.config = config
        self.stop_request = stop_request or StopRequest()
        self.tokenizer = tokenizer
        self.worker_class, self.rollout_class = worker_class, rollout_class
        self.reward_fn = reward_fn
        self.run_metrics = dict(run_metrics or {})
        data = config.data
        self.train_dataset = _prompts(config, tokenizer, file_list(data.train_files), data.train_max_samples)
        self.val_datasets = {
            name: _prompts(config, tokenizer, files, data.val_max_samples)
            for name, files in val_sets(data.val_files).items()
        }
        self.train_loader = ResumableLoader(
            self.train_dataset,
            config.gen_batch_size,
            shuffle=data.shuffle,
            seed=data.seed or 0,
            sampler=create_rl_sampler(data, self.train_dataset.dataset),
        )
        per_epochs = self.train_loader.num_prompts // data.train_batch_size * config.trainer.total_epochs
        self.total_training_steps = config.trainer.total_training_steps or per_epochs
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.global_step = 0
        self.workers: Any = None  # those that train
        self.rollout_workers: Any = None  # those that only generate
        self.tracking: Tracking | None = None
        self.reward_ledger = RewardLedger(config.trainer.report_dir, config.reward_model.ledger)
        samples_per_step = data.train_batch_size * config.actor_rollout_ref.rollout.n
        self.ungraded_limit = UngradedLimit(config.reward_model.max_ungraded_ratio, samples_per_step)
        self.learning = LearningObserver(config, tokenizer.decode, len(tokenizer))

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
        self.use_workers()

    def use_workers(self) -> None:
        """Make the source of samples and everything else that works on the started workers."""
        trainer = self.config.trainer
        num_threads = self.workers.num_threads()
        logger.info("%s=%d in each worker", THREADS, num_threads)
        reason = self.config.actor_rollout_ref.actor.skip_sharing_reason(resolve_device(trainer.device))
        self.group_size = 1 if reason else self.config.actor_rollout_ref.rollout.n
        if self.config.actor_rollout_ref.rollout.n > 1:
            logger.info("samples of a prompt %s in training", f"do not share it ({reason})" if reason else "share it")
        self.source = self._make_source()
        self.checkpoints = RunCheckpoints(
            trainer,
            self.config.actor_rollout_ref.actor.checkpoint.loaded_contents,
            self.workers,
            self.source,
            self.kl_ctrl,
            self.learning,
            learning_settings(self.config) | {THREADS: num_threads},
        )
        self.validator = Validator(
            self.config,
            self.val_datasets,
            self.source.generate,
            self.reward_fn,
            self.reward_ledger,
            self.ungraded_limit,
            self._show_generations,
        )
        self.timeline = StepTimeline(trainer.report_dir, trainer.timeline_freq, self._groups())
        self.observers = self._make_observers()

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

    def _make_source(self) -> SynchronousSource | AsynchronousSource | SavedSource:
        """The source of the steps' samples, by ``trainer.schedule`` and ``trainer.train_only``."""
        saved = self.config.trainer.train_only
        if saved is not None:
            return SavedSource(self.config, self.train_loader, SavedRollouts(Path(saved).expanduser()), self.workers)
        tokens = Tokens(self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        if self.config.has_rollout_ranks:
            return AsynchronousSource(
                self.config, self.train_loader, tokens, self.workers, self.rollout_workers, self._grading()
            )
        return SynchronousSource(self.config, self.train_loader, tokens, self.workers, self._grading())

    def _grading(self) -> Grading | None:
        """How the source grades and filters groups, with dynamic sampling."""
        if not self.config.algorithm.filter_groups.enable:
            return None
        return Grading(
            start=lambda batch: self.reward_fn.start(batch),
            add=self._take_scores,
            record=self.reward_ledger.add,
            keeps=group_filter(self.config),
            end_step=self.learning.end_step,
        )

    def _make_observers(self) -> list[StepObserver]:
        trainer = self.config.trainer
        observers: list[StepObserver] = [self.reward_ledger, self.learning]
        if trainer.records_rollouts:
            rollouts = SavedRollouts(Path(trainer.report_dir).expanduser() / FOLDER)
            observers.append(RolloutSaver(rollouts, self.workers, self.source))
        samples = SampleRecords(
            trainer.report_dir, trainer.log_samples_freq, trainer.log_samples_rows, self.tokenizer, self.workers
        )
        observers += [samples, self.timeline]
        if self.config.is_profiled:
            observers.append(StepProfiles(self.config.global_profiler, self._groups()))
        return observers

    def fit(self) -> None:
        """Resumes, validates, trains to ``total_training_steps``, saving and validating on the way.

        Raises:
            TrainingInterruptedError: a stop was asked for; the last step is saved.
        """
        trainer = self.config.trainer
        self.global_step = self.checkpoints.load()
        first_logged_step = self.global_step + 1 if self.global_step else 0
        if self.global_step >= self.total_training_steps and not trainer.val_only:
            logger.warning(
                "nothing is left to train: %d of %d steps are done; give more steps (STEPS) or another OUTPUT_DIR",
                self.global_step,
                self.total_training_steps,
            )
        self.tracking = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            asdict(self.config),
            directory=trainer.report_dir,
            first_step=first_logged_step,
        )
        for observer in self.observers:
            observer.cut_back(first_logged_step)
        if trainer.val_only or (self.global_step == 0 and trainer.tests_first):
            self._log(self.validator.run(self.global_step, self.timeline.phase_seconds()))
        if trainer.val_only:
            self.tracking.finish()
            return
        self.stop_request.has_steps = True
        while self.global_step < self.total_training_steps:
            self._stop_if_asked(self.global_step)
            self.global_step += 1
            for observer in self.observers:
                observer.before_step(self.global_step)
            metrics = self._train_step()
            self.checkpoints.publish(waits=False)
            is_last = self.global_step == self.total_training_steps
            if trainer.tests_after(self.global_step, is_last=is_last):
                metrics |= self.validator.run(self.global_step, self.timeline.phase_seconds())
            self._log(metrics | self.run_metrics | self.checkpoints.take_timing())
            stops_here = self.stop_request.is_made and not trainer.rollout_only
            if stops_here or trainer.saves_after(self.global_step, is_last=is_last):
                self.checkpoints.save(self.global_step, self.timeline.phase_seconds())
            for observer in self.observers:
                observer.after_step(self.global_step)
        self.checkpoints.publish(waits=True)
        self.tracking.finish()
        if not trainer.rollout_only:
            for observer in self.observers:
                observer.after_run()
        if trainer.export_hf and not trainer.rollout_only:
            path = str(Path(trainer.report_dir) / "export_hf")
            self.workers.export_hf(path)
            logger.info("the trained model is in %s", path)

    def _log(self, metrics: dict[str, float]) -> None:
        assert self.tracking is not None
        for observer in self.observers:
            metrics |= observer.before_log(self.global_step, metrics)
        self.tracking.log(metrics, step=self.global_step)

    def _stop_if_asked(self, step: int) -> None:
        """Raises TrainingInterruptedError after ``step``, which has been saved, when a stop was asked for."""
        if self.stop_request.is_made:
            self.checkpoints.publish(waits=True)
            raise TrainingInterruptedError(step)

    def shutdown(self) -> None:
        """Ends every worker process and closes the files of metrics."""
        for group in self._groups():
            group.shutdown()
        if self.tracking is not None:
            self.tracking.finish(is_done=False)

    def _show_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        if self.tracking is not None:
            self.tracking.log_generations(samples, step)

    def _groups(self) -> list[Any]:
        """The worker groups that have been started, in the order of their ranks."""
        return [group for group in (self.workers, self.rollout_workers) if group is not None]

    def _train_step(self) -> dict[str, float]:
        """One GRPO step: samples, their scores, log-probs, advantages, update; only the scores in ``rollout_only``."""
        config, workers, timing = self.config, self.workers, self.timeline.phase_seconds()
        trains = not config.trainer.rollout_only
        metrics: dict[str, float] = {"training/global_step": self.global_step}
        with marked_timer("step", timing):
            batch, sampling = self.source.next_batch(self.global_step, timing)
            metrics["training/epoch"] = self.source.epoch
            self._balance(batch)
            # Graders run in processes of their own while log-probs are computed; filtered groups have been graded.
            scoring = None if "token_level_scores" in batch.batch else self.reward_fn.start(batch)
            if trains and config.needs_old_log_prob:
                with marked_timer("old_log_prob", timing):
                    batch = batch.union(workers.compute_log_prob(worker_batch(batch)))
            if trains and config.use_reference_policy:
                with marked_timer("ref", timing):
                    batch = batch.union(workers.compute_ref_log_prob(worker_batch(batch)))
            step = Step(self.global_step, batch, sampling, timing)
            with marked_timer("reward", timing):
                self._add_scores(batch, scoring)
                metrics |= sampling | compute_reward_metrics(reward_parts(batch), "reward")
            for observer in self.observers:
                observer.after_rewards(step)
            if trains:
                with marked_timer("adv", timing):
                    metrics |= self._apply_kl(batch)
                    batch = compute_advantage(
                        batch,
                        config.algorithm.adv_estimator,
                        gamma=config.algorithm.gamma,
                        norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
                        config=config.algorithm,
                    )
                for observer in self.observers:
                    observer.before_update(step)
                with marked_timer("update_actor", timing):
                    report = workers.update_actor(worker_batch(batch, "advantages")).meta_info
                metrics |= count_samples_above(
                    batch.batch["num_tokens"],
                    config.exceeded_token_limits,
                    config.training_layout.context_parallel_size,
                )
                if isinstance(self.train_loader.sampler, AbstractCurriculumSampler):
                    batch.meta_info |= sampling
                    metrics |= self.train_loader.sampler.update(batch) or {}
                # Every rank has the same metrics, those of the whole batch.
                metrics |= {name: values[0] for name, values in report["metrics"].items()}
                metrics |= compute_rank_metrics(report.get("by_rank", {}))
        metrics |= compute_data_metrics(batch) | compute_timing_metrics(batch, timing)
        return metrics | compute_throughout_metrics(batch, timing, config.num_devices)

    def _balance(self, batch: DataProto) -> None:
        """Orders the rows so that every data-parallel rank gets its share, by length, of each mini-batch."""
        config, models = self.config, self.config.actor_rollout_ref
        batch.batch[GENERATED_ROW] = torch.arange(len(batch))
        order = balanced_order(
            batch.batch["num_tokens"].tolist(),
            config.training_layout.data_parallel_size,
            models.actor.ppo_mini_batch_size * models.rollout.n,
            balance=config.trainer.balance_batch,
            shuffle_seed=models.actor.shuffle_seed(self.global_step) if models.actor.shuffle else None,
            group_size=self.group_size,
            prompt_lengths=(batch.batch["num_tokens"] - response_lengths(batch.batch["response_mask"])).tolist(),
        )
        batch.reorder(order)
        rollout = models.rollout
        batch.meta_info |= {"temperature": rollout.temperature, "rollout_n": rollout.n, "global_step": self.global_step}

    def _add_scores(self, batch: DataProto, scoring: PendingScores | PendingRewards | None) -> None:
        """Waits for the graders; adds scores to ``batch`` and grades to the ledger. None: this has been done."""
        if scoring is not None:
            scores = scoring.result()
            self.reward_ledger.add(scores.samples)
            self._take_scores(batch, scores)

    def _take_scores(self, batch: DataProto, scores: Scores) -> None:
        """Adds scores to their batch; ValueError when too many samples of a step have none, which the ledger shows."""
        try:
            self.ungraded_limit.add(scores.samples)
        except ValueError:
            self.reward_ledger.write(self.global_step)
            raise
        add_scores(batch, scores, self.config.reward_model.overlong)
        self.learning.add(batch)

    def _apply_kl(self, batch: DataProto) -> dict[str, float]:
        if not self.config.algorithm.use_kl_in_reward:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            return {}
        return apply_kl_penalty(batch, self.kl_ctrl, self.config.algorithm.kl_penalty)[1]


def _prompts(config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, files: list[str], max_samples: int) -> Any:
    dataset = create_rl_dataset(files, config.data, tokenizer, max_samples)
    has_turns = config.actor_rollout_ref.rollout.multi_turn.enable
    template, length = config.data.apply_chat_template_kwargs, config.data.max_prompt_length
    return PromptItems(
        dataset, tokenizer, length, template, has_environments=has_turns, agent_names=agent_names(config)
    )
