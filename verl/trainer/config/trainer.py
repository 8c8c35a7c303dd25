"""Config of the run itself: size, duration, device, outputs, Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schedule import SCHEDULES
from verl.workers.config.keys import Idle, Section, Values, at_least, beside, key, names_of, one_of

_LOGGERS = ("console", "tensorboard", "file", "wandb", "mlflow", "swanlab", "trackio", "clearml")
_FREQUENCY = Values("use -1 for never", lambda value: value != 0)
_PORT = Values("give a port from 1024 to 65535, or 0 for none", lambda value: value == 0 or 1024 <= value <= 65535)
_SECONDS = Values("give seconds above 0", lambda value: value > 0)
_ENVIRONMENT = Values("give env_vars as {NAME: value}", lambda env: isinstance(env.get("env_vars") or {}, Mapping))
_NO_SAMPLES = Idle("{where}.log_samples_freq is off", lambda run, own: own.log_samples_freq <= 0)
_NO_RESUME = Idle("{where}.resume_mode is not resume_path", lambda run, own: own.resume_mode != "resume_path")


@dataclass(frozen=True)
class TrainerConfig(Section):
    """Size, length, device and outputs of a run; ``*_freq`` count steps, and -1 is never."""

    project_name: str = "r1_zero"  #: first part of the default paths of outputs and checkpoints.
    experiment_name: str = "grpo"  #: second part of these paths.
    nnodes: int = key(1, at_least(1))  #: hosts that train; with ``trainer.schedule=sync`` they also generate.
    #: devices of each host, with one worker process per device; on Ascend a device is a die.
    n_gpus_per_node: int = key(8, at_least(1))
    #: ``sync`` generates and trains in turns on the same devices; ``one_step_off`` and ``fully_async`` do both at the
    #: same time, with the devices of ``rollout`` for generation.
    schedule: str = key("sync", one_of(*SCHEDULES))
    #: device type of the workers; ``auto`` takes an NPU or a GPU where there is one.
    device: str = key("auto", one_of("auto", "cpu", "cuda", "npu"))
    #: op table of the training engine as ``module:function``; absent means the device's own.
    train_ops: str | None = None
    #: op table of the rollout engine as ``module:function``; absent means the device's own.
    rollout_ops: str | None = None
    #: use the exact op tables in both engines, whose log-probs are equal bit for bit; on a CPU only, and slower.
    exact_log_probs: bool = False
    total_epochs: int = 1  #: passes over the training rows, in steps of ``data.train_batch_size`` prompts.
    total_training_steps: int | None = None  #: number of steps; absent means that ``total_epochs`` decides.
    #: where metrics go besides ``metrics.jsonl``, one name or a list: ``console``, ``tensorboard``, a tracker
    #: (``wandb``, ``mlflow``, ``swanlab``, ``trackio``, ``clearml``, whose package must be installed), or ``file`` for
    #: nowhere else.
    logger: list[str] = key(lambda: ["console", "tensorboard"], names_of(*_LOGGERS))
    save_freq: int = key(-1, _FREQUENCY)  #: steps between checkpoints.
    test_freq: int = key(-1, _FREQUENCY)  #: steps between validations.
    save_last: bool = True  #: save the last step whatever ``save_freq`` is.
    test_last: bool = True  #: validate after the last step whatever ``test_freq`` is.
    val_before_train: bool = True  #: validate before the first step, as step 0.
    val_only: bool = False  #: validate the weights that a run would start or continue from, and end.
    #: ``auto`` continues from the newest complete checkpoint, ``resume_path`` from ``resume_from_path``, ``disable``
    #: never.
    resume_mode: str = key("auto", one_of("auto", "disable", "resume_path"))
    resume_from_path: str | None = key(None, _NO_RESUME, is_path=True)  #: folder ``global_step_N`` for ``resume_path``.
    #: at Ctrl-C or SIGTERM finish the step, save it and end; a second one ends at once. False ends at the first, and
    #: the run goes on from its last checkpoint.
    save_on_interrupt: bool = True
    #: seconds that the launcher waits for that.
    interrupt_grace_s: float = key(600.0, _SECONDS, beside("save_on_interrupt", False))
    default_local_dir: str = key("checkpoints", is_path=True)  #: folder of the checkpoints.
    #: number of newest checkpoints that are kept; absent means all.
    max_actor_ckpt_to_keep: int | None = key(None, at_least(1))
    #: also keep the checkpoint of every step that is a multiple of this; 0 means none.
    keep_every_steps: int = key(0, Values("give a number of steps, or 0 for none", lambda value: value >= 0))
    #: number of problems of each evaluation set whose transcripts are written to ``val_generations/`` and shown in the
    #: trackers; 0 means none.
    log_val_generations: int = 0
    #: assign rows to the data-parallel ranks by length; with False they are assigned in order.
    balance_batch: bool = True
    #: seconds that the controller waits for an answer of a worker; absent means for ever.
    worker_timeout_s: float | None = None
    #: seconds that the start or restart of the workers waits for free devices, and then for processes.
    start_timeout_s: float = key(600.0, _SECONDS)
    #: number of restarts of dead workers, each from the newest checkpoint, without a new checkpoint in between; a
    #: second death in the same step ends the run; 0 means that the first death does.
    max_restarts: int = key(3, Values("give a number, or 0 for none", lambda value: value >= 0))
    #: seconds without progress in a worker's phase after which a file in ``report_dir``/hang names the ranks that wait
    #: and where; absent means half of ``actor_rollout_ref.nccl_timeout``, after which the job ends; 0 means no
    #: watchdog.
    hang_timeout_s: float | None = key(None, Values("give seconds, or 0 for no watchdog", lambda value: value >= 0))
    timeline_freq: int = key(-1, _FREQUENCY)  #: steps between Chrome traces of a step in ``report_dir``/timeline.
    log_samples_freq: int = key(-1, _FREQUENCY)  #: steps between records of samples in ``report_dir``/samples.
    log_samples_rows: int = key(64, at_least(1), _NO_SAMPLES)  #: the most samples of one record, in whole groups.
    #: write the whole batch of every step to ``report_dir``/rollouts, with scores and log-probs.
    save_rollouts: bool = False
    #: steps generate, score and write their batches in this way; nothing is trained, saved or exported.
    rollout_only: bool = False
    #: folder of such batches, which the steps train on; there is then no rollout engine and no validation.
    train_only: str | None = None
    #: folder of metrics, ledger, traces, records and the exported model.
    report_dir: str = key("outputs", is_path=True)
    #: port of 127.0.0.1 at which a recipe's launcher shows the run as it goes on; absent or 0 means none, and
    #: ``tools.report --serve`` shows any run.
    live_report: int | None = key(None, _PORT)
    export_hf: bool = True  #: write the trained model as a Hugging Face directory when the run ends.

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

    def contradictions(self, where: str) -> Iterator[str]:
        asked = [f"{where}.{name}" for name in ("save_rollouts", "rollout_only", "train_only") if getattr(self, name)]
        if self.train_only and len(asked) > 1:
            yield f"{' and '.join(asked)} are set: with {where}.train_only nothing is generated; leave one out"
        if asked and self.schedule != "sync":
            yield f"{asked[0]} is set: that is there with {where}.schedule=sync, not with {self.schedule}"
        if self.val_only and not self.tests_first:
            yield f"{where}.val_only is True, but nothing is validated: set {where}.val_before_train=True"
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            yield f"{where}.resume_mode is resume_path but {where}.resume_from_path is empty"
        every, name = self.keep_every_steps, f"{where}.keep_every_steps"
        if every <= 0:
            return
        if self.max_actor_ckpt_to_keep is None:
            yield f"{name} is {every}, but without {where}.max_actor_ckpt_to_keep no checkpoint is ever removed"
        if self.save_freq < 1:
            yield f"{name} is {every}, but {where}.save_freq is {self.save_freq}: nothing is saved"
        elif every % self.save_freq:
            above = every // self.save_freq * self.save_freq + self.save_freq
            yield (
                f"{name} {every} is not a multiple of {where}.save_freq {self.save_freq}, so that most of those steps "
                f"are not saved; nearest: {above}"
            )


def _is_due(step: int, freq: int, is_due_anyway: bool) -> bool:
    return is_due_anyway or (freq > 0 and step % freq == 0)


@dataclass(frozen=True)
class RayInitConfig(Section):
    """How the driver reaches Ray."""

    #: address of a running cluster; absent means the RAY_ADDRESS variable, or else a cluster that runs on this machine,
    #: or else one that this process starts.
    address: str | None = None
    #: start a cluster with so many CPUs, whatever else runs on this machine; absent means all cores of one that must be
    #: started.
    num_cpus: int | None = None
    #: start a cluster with so many GPUs; absent means those that Ray finds, of which it sees none in some containers.
    num_gpus: int | None = None
    #: Ray's ``runtime_env`` of the worker processes; its ``env_vars`` are set in this process too.
    runtime_env: dict[str, Any] = key(dict, _ENVIRONMENT, takes_names=True)


@dataclass(frozen=True)
class RayConfig(Section):
    """Ray's own settings."""

    ray_init: RayInitConfig = key(RayInitConfig)
    num_cpus_per_worker: float = 1.0  #: CPUs that Ray reserves for one worker process.
