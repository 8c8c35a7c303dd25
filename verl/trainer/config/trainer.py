"""Knobs of the run itself: size, duration, device, outputs, Ray."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainerConfig:
    """``*_freq`` count steps, -1 is never; ``train_ops``/``rollout_ops`` are "module:function", absent = by device.

    save_last, test_last: the last step is saved and validated whatever the frequencies say.
    exact_log_probs: the exact op tables of both engines, whose log-probs are equal bit for bit; on a CPU, slower.
    max_actor_ckpt_to_keep: the newest so many checkpoints stay, absent = all; keep_every_steps: those of steps that it
    divides stay beside them for good, 0 = none.
    timeline_freq: every so many steps, ``report_dir``/timeline gets a Chrome trace of the step.
    log_samples_freq: every so many steps, ``report_dir``/samples gets a record of ``log_samples_rows`` samples at most.
    hang_timeout_s: when nothing has moved in a worker's phase for so long, one file in ``report_dir``/hang says which
    ranks wait where; absent = half of ``actor_rollout_ref.nccl_timeout``, after which the job ends; 0 = no watchdog.
    """

    project_name: str = "r1_zero"
    experiment_name: str = "grpo"
    nnodes: int = 1
    n_gpus_per_node: int = 8
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
    default_local_dir: str = "checkpoints"
    max_actor_ckpt_to_keep: int | None = None
    keep_every_steps: int = 0
    log_val_generations: int = 0
    balance_batch: bool = True
    worker_timeout_s: float | None = None
    hang_timeout_s: float | None = None
    timeline_freq: int = -1
    log_samples_freq: int = -1
    log_samples_rows: int = 64
    report_dir: str = "outputs"
    export_hf: bool = True

    @property
    def world_size(self) -> int:
        """Devices of the run, one worker process each."""
        return self.nnodes * self.n_gpus_per_node

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        found = []
        if self.device not in ("auto", "cpu", "cuda", "npu"):
            found.append(f"{where}.device is {self.device!r}; expected auto, cpu, cuda or npu")
        if self.nnodes < 1 or self.n_gpus_per_node < 1:
            found.append(
                f"{where}.nnodes {self.nnodes} x n_gpus_per_node {self.n_gpus_per_node} must be at least 1 x 1"
            )
        for name in self.logger:
            if name not in ("console", "tensorboard", "file"):
                found.append(f"{where}.logger names {name!r}; expected console, tensorboard or file")
        if self.resume_mode not in ("auto", "disable", "resume_path"):
            found.append(f"{where}.resume_mode is {self.resume_mode!r}; expected auto, disable or resume_path")
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            found.append(f"{where}.resume_mode is resume_path but {where}.resume_from_path is empty")
        if self.max_actor_ckpt_to_keep is not None and self.max_actor_ckpt_to_keep < 1:
            found.append(f"{where}.max_actor_ckpt_to_keep is {self.max_actor_ckpt_to_keep}; it must be at least 1")
        found += self._keep_every_problems(where)
        if self.log_samples_rows < 1:
            found.append(f"{where}.log_samples_rows is {self.log_samples_rows}; it must be at least 1")
        if self.hang_timeout_s is not None and self.hang_timeout_s < 0:
            found.append(f"{where}.hang_timeout_s is {self.hang_timeout_s}; give seconds, or 0 for no watchdog")
        for key in ("save_freq", "test_freq", "timeline_freq", "log_samples_freq"):
            if getattr(self, key) == 0:
                found.append(f"{where}.{key} is 0; use -1 for never")
        return found

    def _keep_every_problems(self, where: str) -> list[str]:
        every, key = self.keep_every_steps, f"{where}.keep_every_steps"
        if every == 0:
            return []
        if every < 0:
            return [f"{key} is {every}; give a number of steps, or 0 for none"]
        found = []
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


@dataclass(frozen=True)
class RayInitConfig:
    """How the driver reaches Ray: absent ``address`` = the RAY_ADDRESS variable, else a cluster of this process."""

    address: str | None = None
    num_cpus: int | None = None


@dataclass(frozen=True)
class RayConfig:
    """Ray's own settings; ``num_cpus_per_worker`` is what one worker process reserves."""

    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    num_cpus_per_worker: float = 1.0
