"""The driver: ``python -m verl.trainer.main_ppo [--config-path DIR] [--config-name NAME] key=value ...``."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.trainer.command_line import PROGRAM_CONFIG_NAME, read_command_line
from verl.trainer.config import (
    ConfigError,
    PPOTrainerConfig,
    WithoutEffect,
    compose_config,
    config_warnings,
    resolve_config,
    validate_config,
    variables_without_effect,
    without_effect_block,
)
from verl.trainer.config.load import other_defaults, to_yaml
from verl.utils.disk_space import disk_full_line, is_disk_full
from verl.utils.net_utils import ray_is_up
from verl.utils.rank_log import FORMAT

logger = logging.getLogger("verl.trainer.main_ppo")

# Variables of a launcher that starts Ray's head beside this process: the file that it prints to, how long it may take.
HEAD_LOG, HEAD_WAIT = "RL_HEAD_LOG", "RL_HEAD_WAIT_S"
HEAD_POLL_S = 0.05

EXIT_BAD_INPUT = 2
EXIT_WORKER_DIED = 3
EXIT_DISK_FULL = 4
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, config_name: str = PROGRAM_CONFIG_NAME) -> int:
    """Checks everything, then trains; ``config_name`` counts without ``--config-name``.

    Returns 0 when done, 2 for bad input (nothing started), 3 when workers failed, 4 when a disk is full, 130 when it
    was asked to stop and the last step is saved.
    """
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    try:
        args = read_command_line(argv, config_name)
        composed = compose_config(args.overrides, config_name=args.config_name, config_dir=args.config_dir)
        config, unused, problems = _resolve(composed)
        if args.shows_config:
            _raise_problems(problems)
            print(to_yaml(config), end="")
            return 0
        problems += validate_config(config)
        if args.check != "config":
            from verl.trainer.preflight import preflight_problems

            problems += preflight_problems(config, is_valid=not problems)
        _raise_problems(problems)
        variables = os.environ | (config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {})
        if block := without_effect_block([*args.unused, *unused, *variables_without_effect(variables)]):
            logger.info(block)
        if args.check == "config":
            if lines := other_defaults(composed):
                logger.info("\n  ".join(["defaults of verl v0.9.0 that are others here:", *lines]))
            return 0
        from verl.trainer.device_room import fit_to_devices
        from verl.trainer.preflight import tool_warnings

        config, line = fit_to_devices(config)
        if line:
            logger.warning(line)
        warnings = [*config_warnings(config), *tool_warnings(config)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    for warning in warnings:
        logger.warning(warning)
    try:
        return 0 if args.check else run_ppo(config)
    except KeyboardInterrupt:
        logger.warning("stopped; %s", how_to_continue(config.trainer.default_local_dir))
        return EXIT_INTERRUPTED


def _resolve(composed: DictConfig) -> tuple[PPOTrainerConfig, list[WithoutEffect], list[str]]:
    """The typed config, the keys without effect, and what is wrong with others, which have their defaults in it."""
    try:
        return *resolve_config(composed), []
    except ConfigError as error:
        if error.config is None:
            raise
        return error.config, [], error.problems


def run_ppo(config: PPOTrainerConfig) -> int:
    """Joins or starts Ray, trains, restarts dead workers, and always ends every process."""
    import ray

    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.recovery import TrainingStoppedError, fit_with_restarts
    from verl.trainer.ppo.reward_process import make_reward_fn
    from verl.trainer.ppo.stop_request import StopRequest, TrainingInterruptedError
    from verl.utils.import_utils import import_external_libs
    from verl.utils.tokenizer import hf_tokenizer

    import_external_libs(config.actor_rollout_ref.model.external_lib)
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    _init_ray(config)
    reward_fn = make_reward_fn(config, tokenizer)
    training, rollout = worker_classes(config)
    stop_request = StopRequest()

    def new_trainer(config: PPOTrainerConfig, metrics: Mapping[str, float]) -> RayPPOTrainer:
        return RayPPOTrainer(config, tokenizer, training, reward_fn, rollout, metrics, stop_request)

    try:
        with stop_request.listen() if config.trainer.save_on_interrupt else nullcontext():
            fit_with_restarts(config, new_trainer)
    except TrainingInterruptedError as error:
        logger.warning("training %s; %s", error, how_to_continue(config.trainer.default_local_dir))
        return EXIT_INTERRUPTED
    except (OSError, TrainingStoppedError) as error:
        if is_disk_full(error):
            logger.error(disk_full_line(written_folders(config)))
            logger.error(how_to_continue(config.trainer.default_local_dir))
            return EXIT_DISK_FULL
        if isinstance(error, OSError):
            raise
        logger.error("training stopped in step %d: %s", error.step, error)
        logger.error(how_to_continue(config.trainer.default_local_dir))
        return EXIT_WORKER_DIED
    except ValueError as error:
        logger.error("%s", error)
        return EXIT_BAD_INPUT
    finally:
        reward_fn.close()
        ray.shutdown()
    return 0


def written_folders(config: PPOTrainerConfig) -> list[Path]:
    """Where a run writes: results, checkpoints, and what Ray and the graders need for a while."""
    trainer = config.trainer
    return [Path(trainer.report_dir), Path(trainer.default_local_dir), Path(tempfile.gettempdir())]


def how_to_continue(checkpoint_dir: str) -> str:
    """Which checkpoint is kept, and that the same command goes on from it."""
    from verl.trainer.ppo.checkpointing import complete_checkpoints

    newest = next(complete_checkpoints(checkpoint_dir), None)
    if newest is None:
        return "no checkpoint was written yet: the same command starts the training again"
    return f"run the same command again to continue from {newest.directory}, which is kept"


def worker_classes(config: PPOTrainerConfig) -> tuple[type, type | None]:
    """The classes of the processes that train, and of those that only generate, if there are any."""
    from verl.workers.megatron_workers import ActorRolloutRefWorker
    from verl.workers.separate_workers import GroupRolloutWorker, RolloutWorker, SavedRolloutWorker, TrainingWorker

    if config.has_rollout_ranks:
        return TrainingWorker, RolloutWorker
    if config.trainer.train_only is not None:
        return SavedRolloutWorker, None
    return (GroupRolloutWorker if config.algorithm.filter_groups.stop_early else ActorRolloutRefWorker), None


def _init_ray(config: PPOTrainerConfig) -> None:
    import ray

    ray_init = config.ray_kwargs.ray_init
    runtime_env = dict(ray_init.runtime_env)
    if variables := runtime_env.get("env_vars"):
        runtime_env["env_vars"] = {name: str(value) for name, value in variables.items()}
        os.environ.update(runtime_env["env_vars"])
    if address := ray_init.address or os.environ.get("RAY_ADDRESS"):
        if HEAD_LOG in os.environ:
            wait_for_head(Path(os.environ[HEAD_LOG]), float(os.environ[HEAD_WAIT]))
        ray.init(address=address, log_to_driver=True, runtime_env=runtime_env)
    elif ray_init.num_cpus or ray_init.num_gpus is not None:
        sizes: dict[str, Any] = {"num_cpus": ray_init.num_cpus, "num_gpus": ray_init.num_gpus}
        ray.init(address="local", **sizes, include_dashboard=False, runtime_env=runtime_env)
    else:  # Ray joins a cluster that runs on this machine, as after `ray start --head`
        ray.init(include_dashboard=False, runtime_env=runtime_env)


def wait_for_head(log: Path, timeout_s: float) -> None:
    """Returns when the Ray that prints to ``log`` is up, or after ``timeout_s``: Ray then says what is wrong."""
    deadline = time.monotonic() + timeout_s
    while not ray_is_up(log) and time.monotonic() < deadline:
        time.sleep(HEAD_POLL_S)


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


if __name__ == "__main__":
    sys.exit(main())
