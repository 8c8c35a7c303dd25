"""A user's program: five steps of TRL's GRPOTrainer with the engine in its process. The client test runs it.

    python trl_program.py MODEL RESULT.json [--sleep]

It writes the steps' metrics, and how far the engine is from the trainer's model at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

NUM_STEPS = 5


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [sum(char.isdigit() for char in text) / 10 for text in completions]


def settings(folder: Path, sleeps: bool) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=sleeps,
        vllm_max_model_length=64,
        vllm_gpu_memory_utilization=0.01,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        max_steps=NUM_STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        seed=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )


@torch.no_grad()
def gap(trainer: Any) -> dict[str, Any]:
    """Greedy tokens of the engine, with the trainer's weights loaded as before a step, beside the trainer's model."""
    generation, model = trainer.vllm_generation, trainer.model.eval()
    generation.temperature = 0
    generation.sync_weights()
    prompts = [trainer.processing_class.encode(f"What is {i} + {i}?") for i in range(4)]
    _, completions, logprobs, _ = generation.generate(prompts, images=None, num_generations=1)
    worst, is_greedy = 0.0, True
    for prompt, completion, values in zip(prompts, completions, logprobs, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.tensor(values)[:, 0]).abs().max()))
        is_greedy &= logits.argmax(-1).tolist() == completion
    return {"logprob_gap": worst, "is_greedy": is_greedy}


def main(model: str, result: str, *options: str) -> None:
    data = Dataset.from_dict({"prompt": [f"What is {i} + {i}?" for i in range(16)]})
    trainer = GRPOTrainer(
        model=model, reward_funcs=digits, args=settings(Path(result).parent, "--sleep" in options), train_dataset=data
    )
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    changed = [bool((old != new).any()) for old, new in zip(before, trainer.model.parameters(), strict=True)]
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {"steps": steps, "num_changed": sum(changed), "num_weights": len(changed), **gap(trainer)}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
