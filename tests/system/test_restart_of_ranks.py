"""Bar 5 of operation: ranks killed in a run of four processes; it goes on by itself and ends as an undisturbed one."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.system.command import read_metrics, without_measurements
from tests.system.in_process import in_process_config
from tests.system.jobs import Prepared
from verl.single_controller.base import Worker
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.recovery import fit_with_restarts
from verl.trainer.ppo.reward_process import make_reward_fn
from verl.utils.net_utils import free_ports
from verl.utils.timeline import Timeline
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.separate_workers import RolloutWorker, TrainingWorker

NUM_RANKS = 4
STEPS = 4
GOES_ON_S = 60.0  # issue: from the kill to the next step

pytestmark = pytest.mark.timeout(1800)  # whole runs, several starts of four processes each


@dataclass(frozen=True)
class Kill:
    """SIGKILL of ``rank``, ``delay_s`` after it enters ``span`` for the ``nth`` time since it started."""

    rank: int
    span: str
    nth: int
    delay_s: float = 0.0


def mortal_worker(worker_class: type[Worker], folder: Path) -> type[Worker]:
    """The real worker, whose rank dies where a file in ``folder`` says. Built here, so that it is pickled by value."""

    class MortalTimeline(Timeline):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self._rank = rank
            self._entered: dict[str, int] = {}

        @contextmanager
        def span(self, name: str) -> Iterator[None]:
            self._entered[name] = self._entered.get(name, 0) + 1
            num_deaths = len(list(folder.glob("died_*")))
            order = folder / f"{num_deaths}.{self._rank}.{name}.{self._entered[name]}"
            if order.is_file():
                delay_s = float(order.read_text())
                order.unlink()
                threading.Timer(delay_s, self._die).start() if delay_s else self._die()
            with super().span(name):
                yield

        def _die(self) -> None:
            (folder / f"died_{time.time()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    class MortalWorker(worker_class):  # type: ignore[misc, valid-type]
        def __init__(self, config: PPOTrainerConfig, role: str) -> None:
            super().__init__(config, role)
            self.timeline = MortalTimeline(self.rank)

    return MortalWorker


@dataclass(frozen=True)
class Run:
    """One training of four processes in a folder, in this process as the driver."""

    prepared: Prepared
    folder: Path
    more: tuple[str, ...] = ()

    def fit(self, kills: Sequence[Kill] = ()) -> None:
        """Trains to the end, through these deaths, each of which can come only after the one before."""
        config = in_process_config(self.prepared, self.folder, NUM_RANKS, STEPS, *self.more)
        orders = self.folder / "kills"
        orders.mkdir(parents=True)
        for place, kill in enumerate(kills):
            (orders / f"{place}.{kill.rank}.{kill.span}.{kill.nth}").write_text(str(kill.delay_s))
        tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
        reward_fn = make_reward_fn(config, tokenizer)

        def new_trainer(config: PPOTrainerConfig, metrics: Mapping[str, float]) -> RayPPOTrainer:
            if config.has_rollout_ranks:
                training, rollout = (mortal_worker(of, orders) for of in (TrainingWorker, RolloutWorker))
                return RayPPOTrainer(config, tokenizer, training, reward_fn, rollout, metrics)
            worker = mortal_worker(ActorRolloutRefWorker, orders)
            return RayPPOTrainer(config, tokenizer, worker, reward_fn, run_metrics=metrics)

        try:
            fit_with_restarts(config, new_trainer)
        finally:
            reward_fn.close()

    def deaths_s(self) -> list[float]:
        """When ranks were killed, by the clock of the log."""
        return sorted(float(path.name.removeprefix("died_")) for path in (self.folder / "kills").glob("died_*"))

    def restarts(self) -> list[dict[str, Any]]:
        """What the run wrote of its restarts."""
        path = self.folder / "restarts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def results(self) -> dict[str, Any]:
        """All that must not depend on deaths: metrics and ledger without clocks, records and weights as bytes."""
        ledger = {
            path.name: [
                {name: value for name, value in json.loads(line).items() if name != "seconds"}
                for line in path.read_text().splitlines()
            ]
            for path in (self.folder / "reward_ledger").iterdir()
        }
        files = {
            str(path.relative_to(self.folder)): path.read_bytes()
            for name in ("samples", "val_generations", "export_hf")
            for path in (self.folder / name).iterdir()
        }
        return {"metrics": without_measurements(read_metrics(self.folder)), "ledger": ledger, "files": files}


@pytest.fixture(scope="module")
def undisturbed(local_ray: None, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the same run when nothing dies."""
    return undisturbed_results(Run(prepared, tmp_path_factory.mktemp("undisturbed")))


def undisturbed_results(run: Run) -> dict[str, Any]:
    """Runs it through, and looks whether it is whole."""
    run.fit()
    results = run.results()
    assert [row["step"] for row in results["metrics"]] == [*range(STEPS + 1)] and run.restarts() == []
    assert len(results["ledger"]) == STEPS + 3 and any(name.endswith(".safetensors") for name in results["files"])
    return results


def check(run: Run, kills: Sequence[Kill], undisturbed: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Trains through ``kills``; the results must be the undisturbed ones, and every pause short enough."""
    with caplog.at_level(logging.INFO):
        run.fit(kills)
    deaths = run.deaths_s()
    assert len(deaths) == len(kills) == len(run.restarts()), "every order was carried out, and answered once"
    begins = [r.created for r in caplog.records if r.getMessage().startswith(("resumed after", "no checkpoint in"))]
    for kill, killed_s, restart in zip(kills, deaths, run.restarts(), strict=True):
        paused_s = min(started for started in begins if started > killed_s) - killed_s
        place = f"rank {kill.rank} killed in {kill.span}, step {restart['step']}"
        print(f"{place}: training went on from step {restart['from_step']} after {paused_s:.1f} s")
        assert paused_s < GOES_ON_S
    mine = run.results()
    assert mine["metrics"] == undisturbed["metrics"]
    assert mine["ledger"] == undisturbed["ledger"]
    assert mine["files"] == undisturbed["files"]


@pytest.mark.slow  # test_resume_after_kill.py has a killed worker of the real job, tests/verl/test_recovery.py several
def test_a_generating_and_a_training_rank_die(
    prepared: Prepared, undisturbed: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 3 while it generates in step 2, then, in the workers that followed, rank 1 while it trains in step 3."""
    kills = [Kill(3, "wake_kv_cache", nth=3, delay_s=0.1), Kill(1, "update_actor", nth=2, delay_s=0.05)]
    check(Run(prepared, tmp_path), kills, undisturbed, caplog)


BESIDE = (
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.n_gpus_per_node=2",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=2",
)
SCHEDULES = {
    "one_step_off": ("trainer.schedule=one_step_off", *BESIDE),
    "fully_async": ("trainer.schedule=fully_async", "async_training.fixed_order=True", *BESIDE),
}
IN_SYNC = {"one_step_off": Kill(0, "weight_sync", nth=2), "fully_async": Kill(2, "update_weights", nth=2, delay_s=0.02)}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_that_only_train_and_only_generate_die(
    local_ray: None, prepared: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: str
) -> None:
    """Ranks 0 and 1 train, 2 and 3 generate. One of each dies at work, then one in the sync that all take part in."""
    undisturbed = undisturbed_results(Run(prepared, tmp_path / "undisturbed", SCHEDULES[schedule]))
    kills = [Kill(3, "run_steps", nth=2, delay_s=0.02), Kill(1, "update_actor", nth=3, delay_s=0.05), IN_SYNC[schedule]]
    check(Run(prepared, tmp_path / "killed", SCHEDULES[schedule]), kills, undisturbed, caplog)


PHASES = {
    "start": Kill(2, "build_models", nth=1, delay_s=0.2),
    "validation before any checkpoint": Kill(1, "wake_kv_cache", nth=1, delay_s=0.1),
    "validation": Kill(0, "wake_kv_cache", nth=4, delay_s=0.1),
    "weight sync": Kill(0, "weight_sync", nth=3),
    "reference": Kill(2, "compute_ref_log_prob", nth=3),
    "save": Kill(3, "save_checkpoint", nth=2, delay_s=0.02),
    "save by the rank that completes it": Kill(0, "save_checkpoint", nth=3, delay_s=0.05),
    "last save": Kill(1, "save_checkpoint", nth=4),
    "export": Kill(1, "export_hf", nth=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_dies_in_any_phase(
    prepared: Prepared, undisturbed: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, phase: str
) -> None:
    check(Run(prepared, tmp_path), [PHASES[phase]], undisturbed, caplog)


@pytest.mark.slow
def test_ranks_die_one_after_the_other_and_while_they_start_again(
    prepared: Prepared,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five deaths in one run; the second and the fourth strike the workers that the one before has called for.

    The rendezvous is at a port of the user's, which each start must find free again.
    """
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    kills = [
        Kill(0, "update_actor", nth=2),
        Kill(3, "load_checkpoint", nth=1),
        Kill(2, "update_actor", nth=2, delay_s=0.1),
        Kill(1, "build_models", nth=1),
        Kill(1, "wake_kv_cache", nth=2, delay_s=0.1),
    ]
    check(Run(prepared, tmp_path), kills, undisturbed, caplog)
