"""The page of parameters in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from tools.workshop.reference.parameters import ACTOR_ENGINE, REFERENCE_ENGINE, Section, sections
from verl.trainer.config.fixed_keys import FIXED_KEYS

COMMAND = "python -m tools.workshop.reference"
# The keys that a user touches -> when; what it does is in the config's own docstrings
ESSENTIALS: dict[str, str] = {
    "data.train_files": "always: your training rows",
    "data.val_files": "always: your evaluation sets",
    "data.train_batch_size": "more prompts per step for a steadier gradient, fewer for faster steps",
    "data.max_prompt_length": "your prompts are longer",
    "data.max_response_length": "responses are cut (`response_length/clip_ratio` is high), or memory is short",
    "actor_rollout_ref.model.path": "always: the model to start from",
    "actor_rollout_ref.model.external_lib": "you bring an estimator, a loss or a reward manager of your own",
    "custom_reward_function.path": "always, but for code problems: the function that grades answers",
    "algorithm.adv_estimator": "you want another algorithm than GRPO",
    "actor_rollout_ref.rollout.n": "larger groups give GRPO a better baseline and cost generation time",
    "actor_rollout_ref.actor.optim.lr": "the reward does not move, or the policy collapses",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "several updates per batch (off-policy), or exactly one",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "an update runs out of memory, or leaves much of it free",
    "actor_rollout_ref.actor.use_dynamic_bsz": "responses differ much in length",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "with `use_dynamic_bsz`, as the micro-batch size without",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "you want GSPO, CISPO or a loss of your own",
    "actor_rollout_ref.actor.use_kl_loss": "the policy drifts from the reference",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "layers or activations do not fit on one device",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "the model does not fit with TP alone",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "the experts do not fit",
    "actor_rollout_ref.actor.megatron.param_offload": "generation runs out of memory beside the training state",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "the rollout's weights do not fit on one device",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generation runs out of memory, or its cache is too small",
    "actor_rollout_ref.rollout.max_num_seqs": "more sequences at once for throughput, as far as the cache has room",
    "trainer.nnodes": "the run has several hosts",
    "trainer.n_gpus_per_node": "your hosts have another number of devices",
    "trainer.schedule": "generation should run beside training",
    "trainer.total_epochs": "a longer or shorter run",
    "trainer.save_freq": "how much work a failure may cost",
    "trainer.test_freq": "how often you want to see the validation score",
}
_HEAD = f"""# Parameters

Every key of a run's configuration. A key is set in a recipe's YAML file or on the command line, as
`actor_rollout_ref.rollout.n=8`; a key that is not here is an error that names the nearest one, and all problems come in
one message before anything starts. Defaults are those of the code; a recipe's file may set others, and
`bash recipes/r1_zero/ray_start_grpo_npu.sh --print-plan` shows what a run resolves them to. Where the default is
"absent", the meaning says what leaving the key out does.

`{COMMAND} --write` generates this page from the config's classes, and `{COMMAND} --check` compares it with them. The
values of a key are those that its validation names in an error.
"""
_TYPES = {"Any": "text or list", "dict[str, Any]": "section"}


def render() -> str:
    found = [_HEAD, "\n".join(_essentials()) + "\n", *(_table(section) for section in sections())]
    found.append(
        f"## `{REFERENCE_ENGINE}`\n\nThe keys of `{ACTOR_ENGINE}`, whose values count where none is given here.\n"
    )
    found.append("\n".join(_fixed()) + "\n")
    return "\n".join(found)


def _essentials() -> Iterator[str]:
    parameters = {item.key: item for section in sections() for item in section.parameters}
    yield f"## The {len(ESSENTIALS)} keys to know"
    yield ""
    yield "All other keys can stay as they are until a page or a message asks for them."
    yield ""
    yield "| key | default | what it does | touch it when |"
    yield "|---|---|---|---|"
    for key, occasion in ESSENTIALS.items():
        yield _row(f"`{key}`", parameters[key].default, _ticks(parameters[key].meaning.rstrip(".")), occasion)


def _table(section: Section) -> str:
    lines = [f"## `{section.key}`", "", _ticks(section.summary.replace("\n", " ").replace("  ", "\n\n")), ""]
    lines += ["| key | type, values | default | meaning |", "|---|---|---|---|"]
    for item in section.parameters:
        values = ": ".join(part for part in (_TYPES.get(item.type, item.type), item.allowed) if part)
        name = item.key.removeprefix(f"{section.key}.")
        lines.append(_row(f"`{name}`", values, item.default, _ticks(item.meaning.rstrip("."))))
    return "\n".join(lines) + "\n"


def _fixed() -> Iterator[str]:
    yield "## Keys of upstream's scripts that need no action"
    yield ""
    yield "They are accepted so that upstream's scripts run: each is checked, then dropped. A `*` stands for any text."
    yield ""
    yield "| key | values | why |"
    yield "|---|---|---|"
    for key, (values, why) in FIXED_KEYS.items():
        yield _row(f"`{key}`", " or ".join(f"`{value}`" for value in values) or "any", why)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _ticks(text: str) -> str:
    return text.replace("``", "`")
