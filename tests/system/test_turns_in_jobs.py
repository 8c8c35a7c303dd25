"""Whole jobs with samples of several turns, in an environment of a user's own: trained, stopped and resumed."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
from pathlib import Path

import pytest

from recipes.common.recipe import ROOT
from tests.pages import undocumented
from tests.system.command import clean_environment, read_metrics
from tests.system.in_process import fit, in_process_config
from tests.system.jobs import Job, Prepared, assert_same_result
from tests.system.test_asynchronous_schedule import FULLY_ASYNC
from tests.system.test_killed_whole import KILLS, STEPS_OF_KILLS, live_and_die
from verl.trainer.config.override_text import override
from verl.trainer.preflight import preflight_problems

TURNS = "actor_rollout_ref.rollout.multi_turn"
AGAIN = '''
class Again:
    """Asks for more; how often depends on its seed, which all samples of a prompt share."""

    async def reset(self, row, seed):
        self.left = 1 + seed % 3
        return row["messages"]

    async def step(self, action):
        self.left -= 1
        letters = len(action["content"])
        return "And?", letters % 3 / 10, self.left == 0, {"letters": letters}
'''

THRICE = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class Thrice(AgentLoopBase):
    """Goes on, tries a turn once more, or forgets most of what it had, as the row's number says."""

    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        more = await self.apply_chat_template([{"role": "user", "content": "And?"}], remove_system_prompt=True)
        then = prompt
        for _ in range(3):
            given = then
            turn = await self.server_manager.generate("", prompt_ids=given, sampling_params=sampling_params)
            nexts = [given + turn.token_ids + more, prompt, prompt + turn.token_ids[:1] + more]
            then = nexts[kwargs["index"] % 3]
        ones = [1] * len(turn.token_ids)
        return AgentLoopOutput(given, turn.token_ids, ones, reward_score=len(ones) % 3, metrics={"given": len(given)})
'''
BESIDE = ("actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=1")

pytestmark = pytest.mark.timeout(900)


def _turns(folder: Path) -> tuple[str, ...]:
    (folder / "again.py").write_text(AGAIN)
    path = override(f"{TURNS}.environment.path", folder / "again.py")
    return (f"{TURNS}.enable=true", path, f"{TURNS}.environment.name=Again", f"{TURNS}.fixed_order=true")


SCHEDULES: dict[str, tuple[str, ...]] = {
    "sync": ("trainer.n_gpus_per_node=2",),
    "one_step_off": ("trainer.schedule=one_step_off", *BESIDE),
    "fully_async": (
        "trainer.schedule=fully_async",
        "algorithm.rollout_correction={rollout_is:token}",
        "actor_rollout_ref.rollout.speculative_config={method:suffix,num_speculative_tokens:4,adaptive:false}",
        *BESIDE,
    ),
    "stop_early": (
        "trainer.schedule=fully_async",
        "async_training.partial_rollout=False",
        *BESIDE,
        "algorithm.filter_groups={enable:True,metric:score,stop_early:True}",
        "data.gen_batch_size=12",
    ),
}


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.slow) if name == "one_step_off" else name for name in SCHEDULES]
)
def test_two_steps_of_several_turns(local_ray: None, converted: Prepared, tmp_path: Path, schedule: str) -> None:
    config = in_process_config(converted, tmp_path, 1, 2, *_turns(tmp_path), *SCHEDULES[schedule])
    assert preflight_problems(config) == []
    fit(config)
    rows = [row for row in read_metrics(tmp_path) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert undocumented(name for row in rows for name in row) == []
    for row in rows:
        assert row["actor/grad_norm"] > 0 and math.isfinite(row["actor/pg_loss"])
        assert (schedule != "sync" and row["step"] > 1) or row["training/rollout_probs_diff_max"] < 1e-4
        assert row["num_turns/min"] == 1 and row["num_turns/max"] > 1
        assert row["environment/letters"] > 0 and row["reward/environment_reward"] > 0
    # Not of each step: a step's samples may all have ended in a step before.
    assert any(row.get("perf/acceptance_length", 1.0) > 1 for row in rows) == (schedule == "fully_async")
    lines = [json.loads(line) for line in (tmp_path / "reward_ledger" / "step_1.jsonl").read_text().splitlines()]
    assert any("And?" in line["response"] for line in lines)


def test_an_agent_loop_whose_contexts_go_on_and_begin_anew(
    local_ray: None, converted: Prepared, tmp_path: Path
) -> None:
    """Training's log-probs of all that the loop's model wrote are the engine's, in whatever contexts."""
    (tmp_path / "thrice.py").write_text(THRICE)
    (tmp_path / "agent.yaml").write_text(f"- {{name: thrice, _target_: Thrice, path: {tmp_path}/thrice.py}}")
    agent = "actor_rollout_ref.rollout.agent"
    loop = (f"{agent}.agent_loop_config_path={tmp_path}/agent.yaml", f"{agent}.default_agent_loop=thrice")
    config = in_process_config(converted, tmp_path, 1, 1, f"{TURNS}.enable=true", *loop, "data.max_response_length=48")
    assert preflight_problems(config) == []
    fit(config)
    [row] = [row for row in read_metrics(tmp_path) if row["step"]]
    assert undocumented(row) == [] and row["num_turns/max"] == 3
    assert row["num_turns/new_rows"] > 0 and row["environment/given"] > 0 and row["reward/environment_reward"] > 0
    assert row["training/rollout_probs_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "fully_async"])
def test_a_killed_run_is_one_that_never_stopped(prepared: Prepared, tmp_path: Path, schedule: str) -> None:
    overrides, here = _turns(tmp_path), {}
    if schedule == "fully_async":
        overrides, here = (*FULLY_ASYNC, *overrides), {"NNODES": 1}
    whole, struck = (
        Job(prepared, tmp_path / name, overrides=overrides, variables=here) for name in ("whole", "struck")
    )
    whole.finish()
    with struck.command("first", "trainer.max_restarts=0") as command:
        victim = command.wait_for(lambda: command.worker(rank=1), "rank 1")
        command.wait_for(lambda: struck.newest_step >= 2, "checkpoint 2")
        victim.send_signal(signal.SIGKILL)
        assert command.wait(timeout_s=60) != 0
        assert command.left_behind() == []
    struck.finish()
    assert_same_result(struck, whole)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_kills_lose_nothing_of_samples_under_way(prepared: Prepared, tmp_path: Path) -> None:
    """All of it at random moments, while samples wait for their environments, are cut, and are carried over."""
    overrides = (*FULLY_ASYNC, *_turns(tmp_path), "trainer.save_freq=1")
    whole, killed = (
        Job(prepared, tmp_path / name, STEPS_OF_KILLS, overrides=overrides, variables={"NNODES": 1})
        for name in ("whole", "killed")
    )
    whole.finish()
    moments = random.Random(47)
    for kill in range(KILLS):
        live_and_die(killed, f"kill_{kill + 1}", moments.randint(0, 1), moments.uniform(0, 3))
        assert killed.newest_step < STEPS_OF_KILLS, "it must not end before the last kill"
    killed.finish()
    assert_same_result(killed, whole)


@pytest.mark.slow
def test_the_recipe_learns_where_a_tool_pays(tmp_path: Path) -> None:
    environment = clean_environment() | {"OUTPUT_DIR": str(tmp_path)}
    subprocess.run(["bash", "recipes/r1_tools/run.sh"], cwd=ROOT, env=environment, check=True, timeout=900)
    rows = [row for row in read_metrics(tmp_path) if "val/score" in row]
    assert rows[0]["val/score"] <= 0.4 and abs(rows[0]["val/tool_on_hard"] - rows[0]["val/tool_on_easy"]) <= 0.1
    assert rows[-1]["val/score"] >= 0.8
    assert rows[-1]["val/tool_on_hard"] > 0.8 and rows[-1]["val/tool_on_easy"] < 0.3
