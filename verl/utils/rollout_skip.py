"""The first generation of a run on disk, instead of generating (upstream: ``verl.utils.rollout_skip``).

For work on what comes after the rollout, in a trainer of the user's: ``RolloutSkip(config, workers)`` and then
``wrap_generate_sequences()``. A run of ``main_ppo`` saves rollouts with ``trainer.save_rollouts`` (docs/debugging.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.protocol import DataProto


class RolloutSkip:
    """Saves what ``rollout_wg.generate_sequences`` gives once, and gives it back at every later call, in any run.

    Args:
        config: has ``actor_rollout_ref.rollout.{skip_dump_dir,n}``, ``data`` with batch size and lengths, and
            ``trainer.{project_name,experiment_name}``: a file holds for one of each.
        rollout_wg: the worker group.
    """

    print_mark = "[RolloutSkip()]"

    def __init__(self, config: Any, rollout_wg: Any) -> None:
        self._rollout_wg = rollout_wg
        rollout, data, trainer = config.actor_rollout_ref.rollout, config.data, config.trainer
        self.n = int(_key(rollout, "n", 1))
        self.gbs = int(_key(data, "gen_batch_size", None) or _key(data, "train_batch_size", 0))
        self.prompt_length = int(_key(data, "max_prompt_length", 0))
        self.response_length = int(_key(data, "max_response_length", 0))
        root = Path(_key(rollout, "skip_dump_dir", None) or "/tmp/rollout_dump").expanduser()
        self.dumped_dir = root / f"{_key(trainer, 'experiment_name', '')}_{_key(trainer, 'project_name', '')}"
        self.dumped_dir.mkdir(parents=True, exist_ok=True)

    @property
    def curr_path_dump(self) -> Path:
        """The folder of this config's generation."""
        return self.dumped_dir / f"GBS{self.gbs}__N{self.n}_in{self.prompt_length}_out{self.response_length}"

    def wrap_generate_sequences(self) -> None:
        """From now on the worker group gives what is on disk, and generates only where there is nothing."""
        self._rollout_wg.generate_sequences = wrap_generate_sequences(self, self._rollout_wg)

    def try_load(self) -> DataProto | None:
        """What has been saved; None where there is nothing or it cannot be read."""
        path = self._file()
        if not path.is_file():
            return None
        try:
            found = DataProto.load_from_disk(str(path))
        except (OSError, EOFError, ValueError) as error:
            print(f"{self.print_mark} {path} cannot be read, so the rollout generates: {error}", flush=True)
            return None
        print(f"{self.print_mark} Successfully loaded {path}; nothing is generated", flush=True)
        return found

    def dump(self, outputs: DataProto) -> None:
        """Saves a generation; the file appears when it is whole."""
        self.curr_path_dump.mkdir(parents=True, exist_ok=True)
        outputs.save_to_disk(str(self._file()))
        print(f"{self.print_mark} Successfully dumped to {self._file()}", flush=True)

    def _file(self) -> Path:
        return self.curr_path_dump / "gen_batch.dp"


def wrap_generate_sequences(rolloutskip: RolloutSkip, rollout_wg: Any) -> Callable[..., DataProto]:
    """``rollout_wg.generate_sequences`` that looks on disk first, and saves what it has to generate."""
    generate = rollout_wg.generate_sequences

    def skipped(batch: DataProto, **kwargs: Any) -> DataProto:
        found = rolloutskip.try_load()
        if found is None:
            found = generate(batch, **kwargs)
            rolloutskip.dump(found)
        return found

    return skipped


def _key(section: Any, name: str, default: Any) -> Any:
    return section.get(name, default) if hasattr(section, "get") else getattr(section, name, default)
