"""Config of the run itself: size, duration, device, outputs, Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from verl.trainer.config.schedule import SCHEDULES
from verl.workers.config.values import Section, Values, at_least, one_of

_LOGGERS = ("console", "tensorboard", "file", "wandb", "mlflow", "swanlab", "trackio", "clearml")


@dataclass(frozen=True)
class TrainerConfig(Section):
    """Size, length, device and outputs of a run; ``*_freq`` count steps, and -1 is never.

    Attributes:
        project_name: first part of the default paths of outputs and checkpoints.
        experiment_name: second part of these paths.
        nnodes: hosts that train; with ``trainer.schedule=sync`` they also generate.
        n_gpus_per_node: devices of each host, with one worker process per device; on Ascend a device is a die.
        schedule: ``sync`` generates and trains in turns on the same devices; ``one_step_off`` and ``fully_async`` do
            both at the same time, with the devices of ``rollout`` for generation.
        device: device type of the workers; ``auto`` takes an NPU or a GPU where there is one.
        train_ops: op table of the training engine as ``module:function``; absent means the device's own.
        rollout_ops: op table of the rollout engine as ``module:function``; absent means the device's own.
        exact_log_probs: use the exact op tables in both engines, whose log-probs are equal bit for bit; on a CPU only,
            and slower.
        total_epochs: passes over the training rows, in steps of ``data.train_batch_size`` prompts.
        total_training_steps: number of steps; absent means that ``total_epochs`` decides.
        logger: where metrics go besides ``metrics.jsonl``, one name or a list: ``console``, ``tensorboard``, a tracker
            (``wandb``, ``mlflow``, ``swanlab``, ``trackio``, ``clearml``, whose package must be installed), or ``file``
            for nowhere else.
        save_freq: steps between checkpoints.
        test_freq: steps between validations.
        save_last: save the last step whatever ``save_freq`` is.
        test_last: validate after the last step whatever ``test_freq`` is.
        val_before_train: validate before the first step, as step 0.
        resume_mode: ``auto`` continues from the newest complete checkpoint, ``resume_path`` from ``resume_from_path``,
            ``disable`` never.
        resume_from_path: folder ``global_step_N`` for ``resume_path``.
        save_on_interrupt: at Ctrl-C or SIGTERM finish the step, save it and end; a second one ends at once. False ends
            at the first, and the run goes on from its last checkpoint.
        interrupt_grace_s: seconds that the launcher waits for that.
        default_local_dir: folder of the checkpoints.
        max_actor_ckpt_to_keep: number of newest checkpoints that are kept; absent means all.
        keep_every_steps: also keep the checkpoint of every step that is a multiple of this; 0 means none.
        log_val_generations: number of problems of each evaluation set whose transcripts are written to
            ``val_generations/`` and shown in the trackers; 0 means none.
        balance_batch: assign rows to the data-parallel ranks by length; with False they are assigned in order.
        worker_timeout_s: seconds that the controller waits for an answer of a worker; absent means for ever.
        start_timeout_s: seconds that the start or restart of the workers waits for free devices, and then for
            processes.
        max_restarts: number of restarts of dead workers, each from the newest checkpoint, without a new checkpoint in
            between; a second death in the same step ends the run; 0 means that the first death does.
        hang_timeout_s: seconds without progress in a worker's phase after which a file in ``report_dir``/hang names the
            ranks that wait and where; absent means half of ``actor_rollout_ref.nccl_timeout``, after which the job
            ends; 0 means no watchdog.
        timeline_freq: steps between Chrome traces of a step in ``report_dir``/timeline.
        log_samples_freq: steps between records of samples in ``report_dir``/samples.
        log_samples_rows: the most samples of one record, in whole groups.
        save_rollouts: write the whole batch of every step to ``report_dir``/rollouts, with scores and log-probs.
        rollout_only: steps generate, score and write their batches in this way; nothing is trained, saved or exported.
        train_only: folder of such batches, which the steps train on; there is then no rollout engine and no validation.
        report_dir: folder of metrics, ledger, traces, records and the exported model.
        export_hf: write the trained model as a Hugging Face directory when the run ends.
    """

    VALUES: ClassVar = {
        **dict.fromkeys(("nnodes", "n_gpus_per_node", "max_actor_ckpt_to_keep", "log_samples_rows"), at_least(1)),
        "schedule": one_of(*SCHEDULES),
        "device": one_of("auto", "cpu", "cuda", "npu"),
        "logger": Values(f"expected names out of {', '.join(_LOGGERS)}", lambda names: set(names) <= set(_LOGGERS)),
        **dict.fromkeys(
            ("save_freq", "test_freq", "timeline_freq", "log_samples_freq"),
            Values("use -1 for never", lambda value: value != 0),
        ),
        "resume_mode": one_of("auto", "disable", "resume_path"),
        "keep_every_steps": Values("give a number of steps, or 0 for none", lambda value: value >= 0),
        "interrupt_grace_s": Values("give seconds above 0", lambda value: value > 0),
        "start_timeout_s": Values("give seconds above 0", lambda value: value > 0),
        "max_restarts": Values("give a number, or 0 for none", lambda value: value >= 0),
        "hang_timeout_s": Values("give seconds, or 0 for no watchdog", lambda value: value >= 0),
    }

    project_name: str = "r1_zero"
    experiment_name: str = "grpo"
    nnodes: int = 1
    n_gpus_per_node: int = 8
    schedule: str = "sync"
    device: str = "auto"
    train_ops: str | None = None
    rollout_ops: str | None = None
    exact_log_probs: bool = False
    total_epochs: int = 1
    total_training_steps: int | None = None
    logger: list[str] = field(default_factory=lambda: ["console", "tensorboard"])
    save_freq: int = -1
    test_freq: int = -1
    save_last: bool = True
    test_last: bool = True
    val_before_train: bool = True
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    save_on_interrupt: bool = True
    interrupt_grace_s: float = 600.0
    default_local_dir: str = "checkpoints"
    max_actor_ckpt_to_keep: int | None = None
    keep_every_steps: int = 0
    log_val_generations: int = 0
    balance_batch: bool = True
    worker_timeout_s: float | None = None
    start_timeout_s: float = 600.0
    max_restarts: int = 3
    hang_timeout_s: float | None = None
    timeline_freq: int = -1
    log_samples_freq: int = -1
    log_samples_rows: int = 64
    save_rollouts: bool = False
    rollout_only: bool = False
    train_only: str | None = None
    report_dir: str = "outputs"
    export_hf: bool = True

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    @property
    def records_rollouts(self) -> bool:
        return self.save_rollouts or self.rollout_only

    @property
    def tests_first(self) -> bool:
        return self.val_before_train and self.train_only is None

    def tests_after(self, step: int, *, is_last: bool) -> bool:
        return self.train_only is None and _is_due(step, self.test_freq, is_last and self.test_last)

    def saves_after(self, step: int, *, is_last: bool) -> bool:
        return not self.rollout_only and _is_due(step, self.save_freq, is_last and self.save_last)

    def contradictions(self, where: str) -> list[str]:
        asked = [f"{where}.{key}" for key in ("save_rollouts", "rollout_only", "train_only") if getattr(self, key)]
        found = []
        if self.train_only and len(asked) > 1:
            found.append(f"{' and '.join(asked)} are set: with {where}.train_only nothing is generated; leave one out")
        if asked and self.schedule != "sync":
            found.append(f"{asked[0]} is set: that is there with {where}.schedule=sync, not with {self.schedule}")
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            found.append(f"{where}.resume_mode is resume_path but {where}.resume_from_path is empty")
        every, key = self.keep_every_steps, f"{where}.keep_every_steps"
        if every <= 0:
            return found
        if self.max_actor_ckpt_to_keep is None:
            found.append(f"{key} is {every}, but without {where}.max_actor_ckpt_to_keep no checkpoint is ever removed")
        if self.save_freq < 1:
            found.append(f"{key} is {every}, but {where}.save_freq is {self.save_freq}: nothing is saved")
        elif every % self.save_freq:
            above = every // self.save_freq * self.save_freq + self.save_freq
            found.append(
                f"{key} {every} is not a multiple of {where}.save_freq {self.save_freq}, so that most of those steps "
                f"are not saved; nearest: {above}"
            )
        return found


def _is_due(step: int, freq: int, is_due_anyway: bool) -> bool:
    return is_due_anyway or (freq > 0 and step % freq == 0)


@dataclass(frozen=True)
class RayInitConfig(Section):
    """How the driver reaches Ray.

    Attributes:
        address: address of a running cluster; absent means the RAY_ADDRESS variable, or else a cluster that runs on
            this machine, or else one that this process starts.
        num_cpus: start a cluster with so many CPUs, whatever else runs on this machine; absent means all cores of one
            that must be started.
    """

    address: str | None = None
    num_cpus: int | None = None


@dataclass(frozen=True)
class RayConfig(Section):
    """Ray's own settings.

    Attributes:
        num_cpus_per_worker: CPUs that Ray reserves for one worker process.
    """

    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    num_cpus_per_worker: float = 1.0
