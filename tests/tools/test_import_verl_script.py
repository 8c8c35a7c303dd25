"""A launch script of verl is read, never run: its command for here, a verdict on every key, and what stays open."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.doctor.host import ROOT, pinned
from tools.import_verl_script.__main__ import main
from tools.import_verl_script.arithmetic import calculate
from tools.import_verl_script.script import read_script
from tools.import_verl_script.statements import BashError
from tools.import_verl_script.trainer import trainers

UPSTREAM = Path(__file__).resolve().parents[1] / "verl/upstream_scripts"
MEGATRON = "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer"
COMMON = "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True"
TRAINER = f"{MEGATRON} {COMMON}"
WORDS = tuple(TRAINER.split()[3:])


@dataclass(frozen=True)
class Case:
    """A script, the arguments of the command, and what is printed: the words of the command, and pieces of the rest."""

    script: str
    words: tuple[str, ...]
    printed: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    status: int = 0


CASES = {
    "defaults, exports, and a pipe into tee": Case(
        r"""#!/usr/bin/env bash
set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export VLLM_USE_V1=1 NOBODY_READS=2
export WANDB_API_KEY=0123456789abcdef
NNODES=${NNODES:-2}
MODEL_PATH=${MODEL_PATH:-"$HOME/models/Qwen3-8B"}
: "${RUN_NAME:=run_${NNODES}}"
python3 -m verl.trainer.main_ppo \
    --config-path=config \
    --config-name='ppo_megatron_trainer.yaml' \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    trainer.logger='["console","wandb"]' \
    trainer.project_name=team-$WANDB_API_KEY \
    trainer.nnodes=$NNODES trainer.experiment_name=${RUN_NAME} \
    trainer.critic_warmup=0 COMMON $@ 2>&1 | tee -a "${RUN_NAME}.log"
""",
        (
            "--config-path=config",
            "--config-name=ppo_megatron_trainer.yaml",
            "actor_rollout_ref.model.path=~/models/Qwen3-8B",
            'trainer.logger=["console","wandb"]',
            "trainer.project_name=team-<hidden>",
            "trainer.nnodes=2",
            "trainer.experiment_name=run_2",
            "trainer.critic_warmup=0",
            *WORDS[1:],
            "trainer.test_freq=5",
        ),
        (
            "can run here",
            "export what a library needs: CUDA_DEVICE_MAX_CONNECTIONS=1 NOBODY_READS=2 WANDB_API_KEY=<hidden>",
            "VLLM_USE_V1 has no effect here: there is one engine",
            "NNODES=2",
        ),
        ("--", "trainer.test_freq=5"),
    ),
    "arrays and arithmetic": Case(
        r"""max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
sp_size=2
DATA=(
    data.train_files="['/data/a.parquet', '/data/b.parquet']"  # it's "both"
    data.max_prompt_length=${max_prompt_length}

    data.max_response_length=$max_response_length
)
DATA+=(data.truncation='left')
declare -a ACTOR=(
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2 / sp_size))
)
OPTIONS="trainer.nnodes=1   trainer.n_gpus_per_node=8"
OPTIONS+=" trainer.save_freq=$(( 7 % 4 - 2 * 2 ))"
"""
        + TRAINER
        + """ "${DATA[@]}" "${ACTOR[@]}" $OPTIONS""",
        (
            *WORDS,
            "data.train_files=['/data/a.parquet', '/data/b.parquet']",
            "data.max_prompt_length=2048",
            "data.max_response_length=8192",
            "data.truncation=left",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240",
            "trainer.nnodes=1",
            "trainer.n_gpus_per_node=8",
            "trainer.save_freq=-1",
        ),
    ),
    "a substitution and variables of the machine are questions": Case(
        f"""DATA_DIR=$(pwd)/data
FILES="$DATA_DIR/train.parquet"
read -r PASSED
source /opt/env.sh
{TRAINER} data.train_files=$FILES trainer.nnodes=$WORLD_SIZE trainer.n_gpus_per_node=$PASSED \\
    trainer.experiment_name=run_$(date +%F) data.val_files=`ls *.parquet`
""",
        (*WORDS, "data.train_files=$(pwd)/data/train.parquet", "trainer.nnodes=$WORLD_SIZE"),
        (
            "line 1: DATA_DIR: $(pwd): give --set DATA_DIR=...",
            "line 3: PASSED: read -r PASSED: give --set PASSED=...",
            "line 5: WORLD_SIZE: it is not set in the script: give --set WORLD_SIZE=...",
            "trainer.experiment_name: $(date +%F): give --set trainer.experiment_name=...",
            "line 4: source /opt/env.sh",
        ),
        status=1,
    ),
    "answers to questions": Case(
        f"""DATA_DIR=$(pwd)/data
{TRAINER} data.train_files=$DATA_DIR/a.parquet trainer.nnodes=$WORLD_SIZE trainer.experiment_name=run_$(date +%F)
""",
        (*WORDS, "data.train_files=/d/a.parquet", "trainer.nnodes=4", "trainer.experiment_name=of today"),
        options=("--set", "DATA_DIR=/d", "--set", "WORLD_SIZE=4", "--set", "trainer.experiment_name=of today"),
    ),
    "conditions, and the trainer under one": Case(
        f"""STEPS=5
if [ -d /somewhere ]; then STEPS=10; fi
[[ $STEPS -gt 8 && -n "$STEPS" ]] && NODES=2 || NODES=1
if true; then
    case "$1" in
        full|all) EPOCHS=3 ;;
        *)
            EPOCHS=1 ;;
    esac
fi
if ! ray status; then
    {TRAINER} trainer.nnodes=$NODES trainer.total_training_steps=$STEPS \\
        trainer.total_epochs=$EPOCHS
fi
""",
        (*WORDS, "trainer.nnodes=${NODES}"),
        (
            "line 2: STEPS: if [ -d /somewhere ]; then STEPS=10; fi: give --set STEPS=...",
            "line 3: NODES: || NODES=1: give --set NODES=...",
            "EPOCHS=...",
            'line 5: case "$1" in',
            "runs under a condition, which is not checked: if ! ray status; then",
        ),
        status=1,
    ),
    "ray job submit": Case(
        r"""RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
RUNTIME_ENV=${RUNTIME_ENV:-"./runtime_env.yaml"}
ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \
    --address "http://user:pass-word@host:8265" \
    -- \
    python3 -m recipe.dapo.main_dapo \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc data.gen_batch_size=$((512*3)) \
    reward_model.overlong_buffer.enable=False actor_rollout_ref.rollout.n=4 COMMON
""",
        (
            "--config-name=dapo_megatron_trainer",
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=acc",
            "data.gen_batch_size=1536",
            "reward_model.overlong_buffer.enable=False",
            "actor_rollout_ref.rollout.n=4",
            *WORDS[1:],
        ),
        ("ray job submit --no-wait --runtime-env=./runtime_env.yaml --address http://<hidden>@host:8265 --",),
    ),
    "arguments, nohup and a background job": Case(
        r"""lr=$1
shift
HF_TOKEN=hf_verysecret nohup python3 -u -m verl.experimental.fully_async_policy.fully_async_main \
    actor_rollout_ref.actor.optim.lr=$lr rollout.total_rollout_steps=$((512*4)) "$@" \
    COMMON > "log_$lr.txt" 2>&1 &
wait
""",
        (
            "--config-name=fully_async_ppo_trainer",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "rollout.total_rollout_steps=2048",
            "rollout.nnodes=1",
            "rollout.n_gpus_per_node=4",
            *WORDS[1:],
        ),
        ("python -m verl.experimental.fully_async_policy.fully_async_main", "HF_TOKEN=<hidden>", "started by: nohup"),
        ("--", "1e-6", "rollout.nnodes=1", "rollout.n_gpus_per_node=4"),
    ),
    "a loop over learning rates": Case(
        f"for lr in 1e-6 1e-5; do\n    {TRAINER} actor_rollout_ref.actor.optim.lr=$lr\ndone\n",
        (*WORDS, "actor_rollout_ref.actor.optim.lr=${lr}"),
        ("line 1: lr: for lr in 1e-6 1e-5; do: give --set lr=...",),
        status=1,
    ),
    "files that a script writes and removes, and text that looks like code": Case(
        f"""ray stop --force
rm -rf FOLDER/kept
mkdir -p FOLDER/made && touch FOLDER/touched
cat > FOLDER/written.sh <<'EOF'
it's no code: python3 -m verl.trainer.main_ppo "
EOF
cat <<-END > FOLDER/other
	A=wrong $(touch FOLDER/substituted)
	END
grep x <<< "$(touch FOLDER/here)" > FOLDER/found
diff <(touch FOLDER/left) <(echo b)
A=one; B='${{A}}' C="it's \\"$A\\" \\$A"
{TRAINER} 'trainer.project_name='"$B" trainer.experiment_name="$C" trainer.test_freq=${{NONE:+3}} \\
    trainer.default_local_dir=${{DIRECTORY:-FOLDER/ckpt.d}} trainer.total_epochs=${{EPOCHS-2}}
""",
        (
            *WORDS,
            "trainer.project_name=${A}",
            'trainer.experiment_name=it\'s "one" $A',
            "trainer.test_freq=",
            "trainer.default_local_dir=FOLDER/ckpt.d",
            "trainer.total_epochs=2",
        ),
        ("ray (line 1), rm (line 2), mkdir (line 3), touch (line 3)",),
        status=1,  # such a name is no override of Hydra's
    ),
    "keys that are refused, and two trainers": Case(
        f"""{TRAINER} trainer.nnodse=2
{TRAINER} trainer.critic_warmup=3 trainer.experiment_name=second
""",
        (*WORDS, "trainer.critic_warmup=3", "trainer.experiment_name=second"),
        ("refused", "trainer.critic_warmup", "not yet"),
        ("--line", "2"),
        1,
    ),
}


def _run(
    folder: Path, script: str | bytes, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """The exit status, and everything that was printed."""
    file = folder / "run.sh"
    file.write_bytes(script if isinstance(script, bytes) else script.encode())
    try:
        status = main([str(file), "--no-plan", *options])
    except SystemExit as ended:
        status = int(str(ended.code))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def _command(printed: str) -> list[str]:
    """The words of the printed command after its module."""
    text = printed.split("python -m ", 1)[1].split("\n\n")[0]
    return shlex.split(text.replace(" \\\n", " "))[1:]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_script_is_a_command_or_questions(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "kept").touch()
    directory = str(tmp_path / "files")
    monkeypatch.setenv("WORLD_SIZE", "8")  # the environment of whoever reads a script is not its own
    status, printed = _run(
        tmp_path, case.script.replace("FOLDER/", f"{directory}/").replace("COMMON", COMMON), case.options, capsys
    )
    home = os.path.expanduser("~")
    words = [word.replace(f"{directory}/", "FOLDER/").replace(home, "~") for word in _command(printed)]
    flat = " ".join(printed.replace(home, "~").split())
    assert words[: len(case.words)] == [*case.words]
    assert [piece for piece in case.printed if piece not in flat] == []
    assert status == case.status
    assert len(words) == len(case.words) or case.status == 1
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["kept"]
    assert [secret for secret in ("0123456789abcdef", "hf_verysecret", "pass-word") if secret in printed] == []


def test_every_key_has_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {
        "data.train_batch_size=64": "acts",
        "actor_rollout_ref.model.use_remove_padding=True": "no effect",
        "trainer.critic_warmup=3": "refused",
        "+trainer.nnodse=2": "refused",
        "trainer.nnodes=$NODES": "open",
    }
    status, printed = _run(tmp_path, f"{TRAINER} {' '.join(keys)}\n", (), capsys)
    for key, kind in keys.items():
        name = key.lstrip("+").partition("=")[0]
        assert any(line.startswith(kind) and name in line for line in printed.splitlines()), key
    assert status == 1 and "trainer.nnodes" in printed.split("nearest", 1)[1]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("dapo_qwen3_moe_30b_npu", 0),
        ("grpo_moonlight_16b", 0),
        ("one_step_off_qwen2_5_7b", 0),
        ("dapo_qwen3_30b_fp16", 1),
    ],
)
def test_published_command_lines_have_their_verdicts(
    name: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (UPSTREAM / f"{name}.args").read_text(encoding="utf-8").splitlines()
    module, *words = [line for line in lines if line.strip() and line[0] != "#"]
    script = " \\\n    ".join(["python3 -m " + module, *map(shlex.quote, words)])
    found, printed = _run(tmp_path, script, (), capsys)
    assert found == status and ("is 'float16'" in printed) == bool(status)
    assert [word for word in _command(printed) if word in words] == words


def test_the_devices_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 256, "head_dim": 16, **sizes}
    model |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    model |= {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.02}
    model |= {"eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    lines = (
        f"{TRAINER} actor_rollout_ref.model.path=Team/Unknown data.max_prompt_length=64 data.max_response_length=64 "
    )
    lines += "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.n_gpus_per_node=2 "
    lines += "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.n=2 trainer.device=cuda "
    lines += "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.nnodes=1 trainer.total_epochs=1"
    file = tmp_path / "run.sh"
    file.write_text(lines, encoding="utf-8")
    assert main([str(file)]) == 0
    assert "Team/Unknown has no config.json; give --model" in capsys.readouterr().out
    assert main([str(file), "--model", str(tmp_path), "--device", "h100"]) == 0
    assert "plan: fits on 2 x H100" in capsys.readouterr().out
    assert main([str(file), "--device", "none"]) == 0
    assert "no device" in capsys.readouterr().out
    file.write_text(f"python3 -m verl.trainer.main_ppo {COMMON} trainer.n_gpus_per_node=8", encoding="utf-8")
    assert main([str(file), "--model", "qwen3_8b", "--device", "a2", "--no-plan"]) == 0
    assert main([str(file), "--model", "qwen3_8b", "--device", "a2"]) == 1  # whose layout is chosen, as for FSDP
    assert "tensor_model_parallel_size=2 pipeline_model_parallel_size=1" in capsys.readouterr().out
    assert main([str(file), "--model", "qwen3_30b_a3b", "--device", "a2"]) == 1
    assert "does not work: weights, gradients and optimizer take at least" in capsys.readouterr().out


BAD = {
    "empty": (b"", "it is empty"),
    "spaces": (b" \n\n", "it is empty"),
    "Python": (b"#!/usr/bin/env python3\nimport os\n", "starts no shell"),
    "Python without a first line": (b"import os\ndef f(x):\n    return (x, [1])\n", "starts no trainer of verl"),
    "not UTF-8": (b"A=1\nB='\xff\xfe'\n", "line 2: byte 0xff is not UTF-8"),
    "zero bytes": (b"A=\0\n", "zero bytes"),
    "large": (b"A=1\n" * 262144, "a launch script has at most"),
    "a quote": (TRAINER.encode() + b"\nA=1 B='x\nC=2\n", "line 2: ' is opened and never closed"),
    "a double quote": (b'\n\necho "x\n', 'line 3: " is opened and never closed'),
    "a brace": (b"A=${B\n", "line 1: { is opened and never closed"),
    "deep": (b"A=" + b"$((" * 5000, "nested too deeply"),
    "deep and closed": (b"A=" + b"$((" * 5000 + b"))" * 5000, "nested too deeply"),
    "doubling": (b"A=xx\n" + b'A="$A$A"\n' * 60, "line 18: a value is longer than"),
    "doubling an array": (b"A=(x y)\n" + b'A+=("${A[@]}")\n' * 60, "a value is longer than"),
    "a function": (b"f() {\n python3 -m verl.trainer.main_ppo\n}\nf\n", "line 2 names one, in a text, a function"),
    "no trainer": (b"echo 'python3 -m verl.trainer.main_ppo'\n", "line 1 names one"),
}


@pytest.mark.parametrize(("script", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_no_script_is_one_message(
    script: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = _run(tmp_path, script, (), capsys)
    assert status == 2 and message in printed and len(printed.splitlines()) == 1


ODD = {
    "CRLF": ("A=1\r\nB=2\r\n", "$A$B", "12"),
    "circle": ("A=$B\nB=$A\n", "$A", None),
    "division by zero": ("A=$((1/0))\n", "$A", None),
    "a tower": ("A=$((9**9**9))\n", "$A", None),
    "a large product": ("A=$((2**62 * 2**62))\n", "$A", None),
    "not bash's arithmetic": ("A=$(( __import__('os').system('touch x') ))\n", "$A", None),
    "braces": ("", "{a,b}", None),
    "process substitution": ("", "<(ls)", None),
    "select": ("select x in a b; do A=$x; done\nB=1\n", "$B", "1"),
    "an unknown construct": ("coproc x\n((i++))\nfor ((i=0;i<2;i++)); do C=$i; done\nB=1\n", "$B", "1"),
    "a broken statement": ("fi done ;;;\nB=1\n", "$B", "1"),
    "a nested case": ("f() {\n case $1 in\n a) B=2 ;;\n esac\n}\nf a\nB=1\n", "$B", "1"),
    "a subshell": ("B=1; (B=2; cd /x)\n", "$B", None),
    "a positional default": ("", "${1:-seven}", "seven"),
    "unset": ("B=1; unset B\n", "${B:-2}", None),
    "a function": ("f() { f; B=1; }\nf\n", "$B", None),
    "time": ("B=1\ntime true\n", "$B", "1"),
    "ansi": ("", "$'a\\nb'", None),
    "an associative array": ("declare -A B=([x]=1)\n", "${B[x]}", None),
    "an index": ("B=(1 2)\n", "${B[1]}", None),
    "the first": ("B=(1 2)\n", "$B", "1"),
    "count": ("", "$#", None),
    "all in one": ("B=(1 2)\n", '"${B[*]}"', None),
    "shortened": ("B=a.b\n", "${B%.b}", None),
    "defaults in defaults": ("", "${A:-" * 40 + "1" + "}" * 40, "1"),
    "the shell's own": ("", "$$", None),
    "replacing": ("B=1\n", "${B/1/2}", None),
    "continuation": ("B=on\\\ne\n", '"$B"', "one"),
    "no names": ("", "a$", "a$"),
}


@pytest.mark.parametrize(("before", "word", "expected"), ODD.values(), ids=ODD.keys())
def test_odd_bash_is_read_or_left_open(before: str, word: str, expected: str | None) -> None:
    text = f"{before}{TRAINER} trainer.experiment_name={word}\n".replace("\r\n", "\n")
    (trainer,) = trainers(read_script(text, {}, [], "/home").commands)
    found = trainer.arguments[-1]
    assert found.text == f"trainer.experiment_name={expected}" if expected is not None else found.open


SAME = {
    "arrays": r"""A="a  b"; B=(x "y z" $A); C=("${B[@]}" 'q"q'); C+=(1)
python3 -m verl.trainer.main_ppo k=$A "k=$A" "${B[@]}" ${B[@]} "p${C[@]}s" " $A " ''$A"" "$@" $@ x"$@"y""",
    "parameters": r"""N=3; M=$((N*2+1)); E=
python3 -m verl.trainer.main_ppo ${E:-d} ${E-d} ${E:+x} ${N:+x} \
    ${N+"x y"} "${E:-a b}" ${E:-a b} ${E:-"a b"} $((M/2)) $((-M/2)) $((-M%3)) ${U:-$N} "${U:-"$N q"}" ${U:-'s t'} \
    "${U:-'s t'}" ${N}x $N-y \$N "\$N" "\n" 'a'\''b' a\ b $((  N*(M+2) )) $(( $N + ${M} ))""",
    "exports": r"""export X=1 Y="a b"; Z=$Y; Z+=c; readonly R=5; A=(1 2); A+=3
q=$1; shift; python3 -m verl.trainer.main_ppo $q "$@" $X "$Z" $R "$1" "${A[@]}" """,
    "groups": r"""{ K=1; K=2; }
cat <<EOF >/dev/null
P=9 ' " $P
EOF
if true; then L=only; python3 -m verl.trainer.main_ppo $K $L "a
b" a#b # comment ' "
fi""",
    "quotes": r"""a=1;b=2 ;c=3
python3 -m verl.trainer.main_ppo $a$b${c} "$a"'$b'"${c}" k=[a,b] +k=v ~k "k='x'" k=\'y\' k="a'b'c" e={a:1} \
   'c=[1,
2]' d="{\"a\": 1}" | cat & wait""",
}


@pytest.mark.parametrize("end", ['"$@"', '"${@}"', "$@", 'N=()\n{} "${N[@]}" a=1', 'N=()\n{} x"${N[@]}" a=1'])
def test_arguments_that_are_not_there_are_no_words(end: str) -> None:
    before, _, words = end.rpartition("{} ")
    (trainer,) = trainers(read_script(f"{before}{TRAINER} k=1 {words}\n", {}, [], "/h").commands)
    expected = {'"${N[@]}" a=1': ["k=1", "a=1"], 'x"${N[@]}" a=1': ["k=1", "x", "a=1"]}.get(words, ["k=1"])
    assert [word.text for word in trainer.arguments][-len(expected) :] == expected


@pytest.mark.parametrize("script", SAME.values(), ids=SAME.keys())
def test_bash_makes_the_same_words(script: str) -> None:
    shell = ["bash", "-c", 'python3() { printf "<%s>" "${@:3}"; }\n' + script, "run.sh", "x y", "z"]
    done = subprocess.run(
        shell, capture_output=True, text=True, check=True, env={"HOME": "/h", "PATH": os.environ["PATH"]}
    )
    (trainer,) = trainers(read_script(script, {}, ["x y", "z"], "/h").commands)
    assert "".join(f"<{word.text}>" for word in trainer.arguments) == done.stdout


def test_arithmetic_is_bashs() -> None:
    results = [calculate(text) for text in ("7 / -2", "7 % -2", "-7 / 2", "-7 % 2", "7 * 7 - +\n(-2)", "")]
    assert results == [-3, 1, -3, -1, 51, 0]


@pytest.mark.parametrize(
    "piece",
    ["export SOME_VARIABLE=${OTHER:-value}\n", "[[ ", "case x in\n", "$A", "{,", "if [\n", ",,,,", "a || B=1\n"],
)
def test_a_large_script_is_read_in_time(piece: str) -> None:
    text = piece * (100_000 // len(piece)) + f"\n{TRAINER} trainer.nnodes=1\n"
    started = time.monotonic()
    with suppress(BashError):
        read_script(text, {}, [], "/home")
    assert time.monotonic() - started < 30


def test_bashlex_is_asked_for_by_its_pin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bashlex", None)
    status, printed = _run(tmp_path, TRAINER, (), capsys)
    pin = f"bashlex=={pinned(ROOT / 'requirements/dev.txt')['bashlex']}"
    assert status == 2 and f"pip install {pin}; it is GPL-3.0" in printed
    assert "bashlex" not in pinned(ROOT / "requirements/base.txt")


def test_arguments_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent.sh")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert _run(tmp_path, TRAINER, ("--set", "name"), capsys)[0] == 2
    assert _run(tmp_path, TRAINER, ("--line", "9"), capsys) == (
        2,
        f"error: {tmp_path / 'run.sh'}: no trainer is started on line 9; there is one on 1\n",
    )
