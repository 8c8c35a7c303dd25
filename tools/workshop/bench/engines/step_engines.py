"""The engines of the step benchmark: ours and TRL's GRPOTrainer, each answering ``step`` with one whole GRPO step.

Run as a program of the engine's environment: ``python step_engines.py OPTIONS``; see ``engine_server``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from engine_server import Channel, Stopwatch, answer_all, pretrained


def reward_of(text: str) -> float:
    """The share of words with an even number, which is the reward in both engines."""
    words = text.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


class OurStep:
    """The recipe's worker in this process, driven as the trainer drives it, without Ray between them."""

    def __init__(self, options: dict[str, Any]) -> None:
        import os

        import torch
        from transformers import AutoTokenizer

        from verl.trainer.config import load_config, validate_config
        from verl.workers.megatron_workers import ActorRolloutRefWorker

        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.config = load_config(options["overrides"])
        if problems := validate_config(self.config):
            raise ValueError("\n".join(problems))
        self.name = "ours"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(options["model"])
        self.worker: Any = ActorRolloutRefWorker(self.config, "actor_rollout")
        self.worker.init_model()
        self.num_steps = 0

    def step(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Generate, score and update; time the whole and its two large parts."""
        import numpy as np
        import torch

        from verl.protocol import DataProto
        from verl.trainer.ppo.schedules.generation import sampling_seeds
        from verl.trainer.ppo.step_functions import compute_advantage
        from verl.workers.row_store import worker_batch

        self.num_steps += 1
        rollout = self.config.actor_rollout_ref.rollout
        stopwatch = Stopwatch()
        repeated = [ids for ids in prompts for _ in range(rollout.n)]
        rows = len(repeated)
        raw = np.empty(rows, dtype=object)
        raw[:] = repeated
        seeds = sampling_seeds(rollout.seed, self.num_steps, 0, rows)
        request = DataProto.from_dict(
            non_tensors={"raw_prompt_ids": raw, "sampling_seeds": seeds},
            meta_info={"eos_token_id": 1, "pad_token_id": 0},
        )
        batch = self.worker.generate_sequences(request)
        generated = stopwatch.read()["seconds"]
        batch.meta_info |= {"temperature": rollout.temperature, "rollout_n": rollout.n, "global_step": self.num_steps}
        texts = self.tokenizer.batch_decode(batch.batch["responses"])
        rewards_BR = torch.zeros(batch.batch["responses"].shape)
        rewards_BR[:, -1] = torch.tensor([reward_of(text) for text in texts])
        batch.batch["token_level_rewards"] = rewards_BR
        batch.non_tensor_batch["uid"] = np.array([str(row // rollout.n) for row in range(rows)], dtype=object)
        batch = compute_advantage(batch, self.config.algorithm.adv_estimator, config=self.config.algorithm)
        scored = stopwatch.read()["seconds"]
        metrics = self.worker.update_actor(worker_batch(batch, "advantages")).meta_info["metrics"]
        measured = stopwatch.read()
        return measured | {
            "generate_seconds": generated,
            "update_seconds": measured["seconds"] - scored,
            "num_tokens": int(batch.batch["response_mask"].sum()),
            "reward": float(rewards_BR.sum(-1).mean()),
            "grad_norm": float(metrics["actor/grad_norm"]),
        }


def run_trl(channel: Channel) -> None:
    """TRL's own training loop; each of its steps waits for a request and answers it."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    options = channel.options
    model, variant = pretrained(options)
    tokenizer = AutoTokenizer.from_pretrained(options["model"], padding_side="left")
    seen: dict[str, Any] = {}

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen["num_tokens"] = sum(map(len, completion_ids))
        rewards = [reward_of(text) for text in completions]
        seen["reward"] = sum(rewards) / len(rewards)
        return rewards

    class Turns(TrainerCallback):
        """Holds each step until it is asked for."""

        def __init__(self, requests: Iterator[dict[str, Any]]) -> None:
            self.requests = requests

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if next(self.requests, None) is None:
                raise SystemExit(0)
            self.stopwatch = Stopwatch()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            channel.answer(self.stopwatch.read() | seen)

    steps: list[list[list[int]]] = options["steps"]
    texts = [" ".join(f"t{token}" for token in ids) for prompts in steps for ids in prompts]
    with tempfile.TemporaryDirectory() as output_dir:
        config = _grpo_config(options, output_dir)
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[Turns(channel.requests())],
        )
        channel.answer({"name": f"trl {trl.__version__}, {variant}"})
        trainer.train()


def _grpo_config(options: dict[str, Any], output_dir: str) -> Any:
    """Return TRL's settings for the same steps as ours."""
    import trl

    rows = len(options["steps"][0]) * options["samples"]
    micro_rows = options["micro_rows"] or rows
    return trl.GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=options["dtype"] == "bfloat16",
        per_device_train_batch_size=micro_rows,
        gradient_accumulation_steps=rows // micro_rows,
        num_generations=options["samples"],
        max_completion_length=options["new_tokens"],
        generation_kwargs={"min_new_tokens": options["new_tokens"]},
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        num_iterations=1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=len(options["steps"]),
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


if __name__ == "__main__":
    opened = Channel()
    if opened.options["engine"] == "ours":
        answer_all(opened, OurStep(opened.options))
    else:
        run_trl(opened)
