"""Checks before a run starts: weights, data, reward functions and writable directories."""

from __future__ import annotations

import fnmatch
import inspect
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_formats.chat import NO_TEMPLATE, chat_text
from hf_formats.config import load_hf_config
from mindspeed_llm.hf_checkpoint import open_hf
from mindspeed_llm.load_weights import open_shards
from verl.experimental.agent_loop.environment import load_environment
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.checks import missing_dispatcher
from verl.trainer.config.data import file_list
from verl.trainer.ppo.checkpointing import checkpoints, resume_problem
from verl.trainer.ppo.filter_groups import load_filter
from verl.trainer.ppo.observers import steps_of
from verl.trainer.ppo.reward import manager_arguments, reward_manager_class
from verl.trainer.ppo.saved_rollouts import FILES
from verl.utils.dataset.creation import dataset_class, sampler_class
from verl.utils.parquet import data_sources, first_prompts, schema_problems
from verl.utils.reward_score import code_answers
from verl.utils.reward_score.default import DEFAULT_SOURCES, has_default, runs_programs
from verl.utils.reward_score.functions import DEFAULT_FUNCTION, RewardFunctionSpec, function_of, load_reward_function
from verl.utils.reward_score.sandbox import missing_protection
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.trackers import missing_packages
from verl.workers.engine_setup import engine_problems, trained_model
from verl.workers.reward_manager import MANAGERS
from verl.workers.reward_manager.sample_wise import grades_samples
from verl.workers.rollout.environment_host import host_settings
from vllm.transformers_utils.config import load_config as load_rollout_config

_ROWS_RENDERED = 100  # of each file


def preflight_problems(config: PPOTrainerConfig, is_valid: bool = True) -> list[str]:
    """Returns every problem on this machine's disks that would stop the run, one sentence each; starts nothing.

    ``is_valid``: whether ``validate_config`` has found nothing; else no layout is tried on the model.
    """
    return [
        *_weight_problems(config, is_valid),
        *_data_problems(config),
        *reward_problems(config),
        *plugin_problems(config),
        *_output_problems(config),
        *missing_packages(config.trainer.logger),
        *missing_dispatcher(config),
    ]


def plugin_problems(config: PPOTrainerConfig) -> list[str]:
    """What is wrong with the user's own classes and filter, whose files run here, and with records to train on."""
    return [
        *_class_problems(config),
        *_environment_problems(config),
        *reward_manager_problems(config),
        *_filter_problems(config),
        *_record_problems(config),
    ]


def _weight_problems(config: PPOTrainerConfig, is_valid: bool) -> Iterator[str]:
    models = config.actor_rollout_ref
    path = Path(models.model.path).expanduser()
    if not (path / "config.json").is_file():
        yield f"actor_rollout_ref.model.path: {path} has no config.json; it must be a Hugging Face model directory"
        return
    if not (path / "tokenizer_config.json").is_file():
        yield f"actor_rollout_ref.model.path: {path} has no tokenizer_config.json; copy the tokenizer there"
    else:
        yield from _tokenizer_problems(path, config)
    engine = models.actor.megatron
    key = "model.path"
    try:
        hf = load_hf_config(path)
        if not is_valid:
            return
        yield from engine_problems(models, config.trainer.world_size, hf)
        yield from _rollout_model_problems(path)
        if not (models.actor.load_weight and engine.load_weight):
            return
        if engine.use_dist_checkpointing and not engine.dist_checkpointing_path:
            yield (
                "actor_rollout_ref.actor.megatron.use_dist_checkpointing is True but dist_checkpointing_path is empty; "
                "give the folder of the shards, or False to start from actor_rollout_ref.model.path"
            )
        elif engine.use_dist_checkpointing:
            key = "actor.megatron.dist_checkpointing_path"
            open_shards(str(engine.dist_checkpointing_path), trained_model(hf, engine))
        else:
            open_hf(path, hf).close()
    except ValueError as error:
        yield f"actor_rollout_ref.{key}: {error}"


def _tokenizer_problems(path: Path, config: PPOTrainerConfig) -> Iterator[str]:
    """A tokenizer that cannot be read, or whose chat template refuses what stands first in a file of prompts."""
    try:
        tokenizer = hf_tokenizer(str(path), correct_pad_token=False)
    except ValueError as error:
        yield f"actor_rollout_ref.model.path: {error}"
        return
    key, kwargs, files = config.data.prompt_key, config.data.apply_chat_template_kwargs, [*_files_of_prompts(config)]
    if files and tokenizer.chat_template is None and "chat_template" not in kwargs:
        yield f"actor_rollout_ref.model.path: {NO_TEMPLATE}"
        return
    for name, file in files:
        if schema_problems(file, key):
            continue  # reported as problems of the data
        for index, chat in enumerate(first_prompts(file, key, _ROWS_RENDERED)):
            try:
                chat_text(tokenizer, chat, **kwargs)
            except ValueError as error:
                yield f"data.{name}: row {index} of {file}: {error}"
                break


def _files_of_prompts(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """The files in the form of the repository's own data set; a class of a user knows the form of its."""
    if config.data.custom_cls.path is None:
        yield from _files(config)


def _files(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """(key, file) of all data."""
    for key, files in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        yield from ((key, file) for file in file_list(files))


def _rollout_model_problems(path: Path) -> Iterator[str]:
    """Models that the training engine supports and the rollout engine does not."""
    try:
        load_rollout_config(str(path))
    except ValueError as error:
        yield f"actor_rollout_ref.rollout: the rollout engine does not know this model yet: {error}"


def _class_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Data set and sampler that the config names and that cannot be made."""
    for key, load in (("data.custom_cls", dataset_class), ("data.sampler", sampler_class)):
        try:
            load(config.data)
        except Exception as error:  # a process edge: the user's file runs here, and may raise anything
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            yield text if text.startswith(key) else f"{key}: {text}"


def _environment_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """An environment's class, or a file of tools, that cannot be used."""
    rollout = config.actor_rollout_ref.rollout
    where = "tool_config_path" if rollout.multi_turn.environment.path is None else "environment"
    where = "agent" if rollout.agent.has_loops else f"multi_turn.{where}"
    try:
        if (settings := host_settings(config)) is not None:
            load_environment(settings.environment)(**settings.environment.kwargs)
    except Exception as error:  # a process edge: the user's file runs here, and may raise anything
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        yield text if where in text else f"actor_rollout_ref.rollout.{where}: {text}"


def tool_warnings(config: PPOTrainerConfig) -> Iterator[str]:
    """Tools of which the chat template does not tell the model, of a run that has no problems."""
    settings = host_settings(config)
    if settings is None:
        return
    environment = load_environment(settings.environment)(**settings.environment.kwargs)
    if not (tools := list(getattr(environment, "tools", ()))):
        return
    tokenizer = hf_tokenizer(settings.model_path, correct_pad_token=False)
    chat, given = [{"role": "user", "content": "?"}], settings.template_kwargs
    if chat_text(tokenizer, chat, **given) == chat_text(tokenizer, chat, tools=tools, **given):
        yield (
            f"the chat template of {settings.model_path} shows the model no tools: the prompts must tell of them, or "
            "give a template that does (data.apply_chat_template_kwargs.chat_template)"
        )


def _data_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Files in another form than that of the data set."""
    if config.data.custom_cls.path is not None:
        yield from (f"data.{key}: {file} does not exist" for key, file in _files(config) if not Path(file).exists())
    for key, file in _files_of_prompts(config):
        yield from (f"data.{key}: {problem}" for problem in schema_problems(file, config.data.prompt_key))


def _record_problems(config: PPOTrainerConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.train_only is None:
        return
    steps = steps_of(Path(trainer.train_only).expanduser(), FILES)
    if not steps:
        yield f"trainer.train_only: {trainer.train_only} has no records {FILES}, as trainer.save_rollouts writes them"
    elif trainer.total_training_steps is not None and trainer.total_training_steps > steps[-1]:
        yield (
            f"trainer.train_only: {trainer.train_only} has records up to step {steps[-1]}, but "
            f"trainer.total_training_steps is {trainer.total_training_steps}"
        )


def _filter_problems(config: PPOTrainerConfig) -> Iterator[str]:
    filters = config.algorithm.filter_groups
    if not filters.enable or filters.filter_path is None:
        return
    try:
        load_filter(filters.filter_path)
    except Exception as error:  # a process boundary: the user's file runs here and may raise anything
        yield str(error) if isinstance(error, ValueError) else f"{filters.filter_path}: {type(error).__name__}: {error}"


def _output_problems(config: PPOTrainerConfig) -> Iterator[str]:
    for key in ("default_local_dir", "report_dir"):
        path = Path(getattr(config.trainer, key)).expanduser()
        problem = writable_problem(path)
        if problem:
            yield f"trainer.{key}: {problem}"
    if config.trainer.resume_mode == "resume_path" and (wrong := resume_problem(str(config.trainer.resume_from_path))):
        yield wrong
    root = config.trainer.default_local_dir
    if config.trainer.resume_mode == "disable" and (earlier := checkpoints(root)):
        yield (
            f"trainer.resume_mode is disable, but {root} holds {len(earlier)} checkpoints of an earlier run, which "
            "a later resume would take for this run's; remove them or choose another trainer.default_local_dir"
        )


def writable_problem(path: Path) -> str | None:
    """Returns why files cannot be written under ``path``, which is created later; None when they can."""
    existing = path.absolute()
    while not os.path.exists(existing):  # unlike Path.exists, False where access is not permitted
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is a file, so {path} cannot be a directory"
    try:
        descriptor, name = tempfile.mkstemp(dir=existing)
    except OSError as error:
        return f"{existing} is not writable ({error.strerror}); choose another directory"
    os.close(descriptor)
    os.unlink(name)
    return None


def reward_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Every reason why answers could not be graded, one sentence each; runs the files of the reward functions."""
    custom, where = config.custom_reward_function, "custom_reward_function"
    is_batched = config.reward_model.reward_manager == "batch"
    if custom.default is not None:
        yield from _function_problems(where, custom.default, is_batched)
    for source, function in custom.sources.items():
        yield from _function_problems(f"{where}.by_data_source.{source}", function, is_batched)
    yield from _source_problems(config)


def reward_manager_problems(config: PPOTrainerConfig) -> list[str]:
    """Why the class of a user that is the reward manager cannot be made or called; its file runs here."""
    reward, found = config.reward_model, []
    name, kwargs, spec = reward.reward_manager, reward.reward_kwargs, reward.manager_spec
    if reward.is_pooled or (name not in MANAGERS.names if spec is None else reward.manager_path is None):
        return []  # validate_config reports an unknown one
    where = f"reward_model.reward_manager={name}" if spec is None else f"reward_model.manager_path={spec.path}"
    try:
        manager = reward_manager_class(reward)
        if not isinstance(manager, type):
            raise ValueError(f"{manager!r} is no class")
    except Exception as error:  # a process edge: the user's file runs here, and may raise anything
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return [f"{where}: {text}; reward_model.reward_manager, or manager_class, names the class"]
    where = f"{where}: {manager.__qualname__}"
    given = dict.fromkeys(("tokenizer", "num_examine", "compute_score", "reward_fn_key"))
    given = manager_arguments(manager, config, given | kwargs)
    if not is_callable_with(manager, **given):
        names = f"{', '.join(given)}{', of which some are reward_model.reward_kwargs' if kwargs else ''}"
        found.append(f"{where}{_signature(manager)} is made with the arguments {names}; it must take them")
    method, named = ("run_single", {}) if grades_samples(manager) else ("__call__", {"return_dict": True})
    called = next((vars(base)[method] for base in manager.__mro__ if method in vars(base)), None)
    if inspect.isabstract(manager) or not is_callable_with(called, None, None, **named):
        found.append(f"{where} must have the method __call__(self, data, return_dict=False), or run_single(self, data)")
    return found


def is_callable_with(function: Any, *values: Any, **named: Any) -> bool:
    """Whether the signature of ``function`` takes these arguments; False for what is no function."""
    try:
        inspect.signature(function).bind(*values, **named)
    except (TypeError, ValueError):
        return False
    return True


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return ""


def _function_problems(where: str, spec: RewardFunctionSpec, must_be_batched: bool) -> Iterator[str]:
    try:
        function = load_reward_function(spec)
    except Exception as error:  # a process edge: the user's file runs here, and may raise anything
        yield f"{where}: {error if isinstance(error, ValueError) else f'{type(error).__name__}: {error}'}"
        return
    if must_be_batched and not function.is_batched:
        yield (
            f"{where}: reward_model.reward_manager is 'batch', but {spec.name} of {spec.path} takes one sample; its "
            "first parameter must be data_sources, or set reward_manager=naive"
        )


def _source_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Yield the mismatches of data and config: rows without a function, functions without a row."""
    files = [file for _, file in _files(config)]
    if config.data.custom_cls.path is not None:
        return  # its rows are not known yet
    if any(schema_problems(file, config.data.prompt_key) for file in files):
        return  # reported as problems of the data
    custom, sources = config.custom_reward_function, sorted(data_sources(files))
    for pattern in custom.by_data_source:
        if pattern not in sources and not any(fnmatch.fnmatchcase(source, pattern) for source in sources):
            where = f"custom_reward_function.by_data_source.{pattern}"
            yield f"{where} matches no data source; the data has {_listed(sources)}"
    chosen = {source: function_of(source, custom.sources, custom.default) for source in sources}
    without = [source for source in sources if chosen[source] == DEFAULT_FUNCTION and not has_default(source)]
    if without:
        yield (
            f"no reward function for the data source {_listed(without)}: custom_reward_function.path is empty; give "
            "the Python file of a reward function there or in custom_reward_function.by_data_source (without one: "
            f"{', '.join(DEFAULT_SOURCES)})"
        )
    if any(_runs_programs(chosen[source], source) for source in sources if source not in without):
        missing = missing_protection()
        if missing:
            yield missing


def _runs_programs(spec: RewardFunctionSpec, source: str) -> bool:
    """Whether one of our own functions runs a source's programs; a user's function is not known to."""
    if spec == DEFAULT_FUNCTION:
        return runs_programs(source)
    return Path(spec.path) == Path(code_answers.__file__)


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
