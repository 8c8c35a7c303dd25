#!/usr/bin/env bash
# Makes the project's virtual environment from the pinned requirements, or says that it is already made.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tools/setup_env.sh [base|dev|simulator|command|python]

  base       what a run needs (default); torch_npu is added on a machine that has NPUs, and on one with an NVIDIA driver
             torch is its build for CUDA (requirements/cuda.txt)
  dev        base, and what the tests and checks need
  simulator  a second environment over the dev one, with torch_npu, for tests/npu on a machine without NPUs
  command    no packages: only the command `vllm` of an environment that is there (base and dev make it too)
  python     nothing: prints the interpreter that it would take

Environment: STACK         which versions: cann92 (default; requirements/, torch 2.13) or cann82 (requirements/cann82/, torch
                           2.5.1 for CANN 8.2.RC1, base and dev only); an environment keeps the stack that it was made with
             VENV_DIR      where to make it (default: .venv in the repository)
             NPU_VENV_DIR  where to make the simulator's (default: .venv-npu in the repository)
             PYTHON        the interpreter to make it with (default: the first python3 that is 3.11 to 3.14)
             TORCH_CPU_INDEX  where to look for torch's CPU build when pip finds none (default: PyTorch's own index,
                           https://download.pytorch.org/whl/cpu; no: nowhere)

Without an NVIDIA GPU torch is its CPU build, from where pip looks or from TORCH_CPU_INDEX, which has 5 s to answer; else it
is the build for CUDA, which PyPI has.

Afterwards run things with "$VENV_DIR/bin/python", or `source "$VENV_DIR/bin/activate"`.
TEXT
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_DIR="${VENV_DIR:-$ROOT/.venv}"
LAYER="${1:-base}"
STACK="${STACK:-cann92}"
TORCH_CPU_INDEX="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"

say() { echo "[setup] $*" >&2; }
die() {
    echo "[setup] error: $*" >&2
    exit 1
}

case "$LAYER" in
    -h | --help) usage && exit 0 ;;
    base | dev | simulator | command | python) ;;
    *) usage >&2 && die "unknown layer '$LAYER': expected base, dev, simulator, command or python" ;;
esac

# The wheels of torch-npu 2.5.1.post1 end at Python 3.11, those of torch 2.13 at 3.14.
case "$STACK" in
    cann92) REQUIREMENTS="$ROOT/requirements" PYTHON_RANGE="3.11 to 3.14" IS_WANTED='(3, 11) <= sys.version_info[:2] <= (3, 14)' ;;
    cann82) REQUIREMENTS="$ROOT/requirements/cann82" PYTHON_RANGE="3.11" IS_WANTED='sys.version_info[:2] == (3, 11)' ;;
    *) die "unknown STACK=$STACK: expected cann92 or cann82" ;;
esac

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c "import sys; sys.exit(not ($IS_WANTED))" 2>/dev/null; then
            echo "$candidate"
            return
        elif [ "$candidate" = "${PYTHON:-}" ]; then
            die "PYTHON=$PYTHON is not a Python $PYTHON_RANGE that runs: name another, or unset PYTHON"
        fi
    done
    local seen
    seen="$(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null || true)"
    die "no Python $PYTHON_RANGE found${seen:+ (python3 is $seen)}: install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv; elsewhere: conda create -n py python=3.11, or uv python install 3.11) or set PYTHON=/path/to/python3"
}

has_npu() {
    compgen -G "/dev/davinci[0-9]*" >/dev/null || command -v npu-smi >/dev/null 2>&1
}

has_gpu() {
    compgen -G "/dev/nvidia[0-9]*" >/dev/null || command -v nvidia-smi >/dev/null 2>&1
}

# `ray start` puts the path into a command of a shell, unquoted; other characters, of any alphabet, come through.
check_path() { # NAME FOLDER
    local path="$2"
    [[ "$path" = /* ]] || path="$PWD/$path"
    case "$path" in
        *[[:space:]\'\"\\\$\`\;\&\|\<\>\(\)\*\?]*) die "$1=$path has a space or another character of the shell in its path, and Ray cannot start from such an environment: set $1 to a folder without one, for example $1=/tmp/r1_zero-venv" ;;
        *:*) die "$1=$path has a colon in its path, and Python makes no environment there: set $1 to a folder without one" ;;
    esac
}

# The folder is looked into under its lock: one that another run is just making has files, and no pyvenv.cfg yet.
lock_venv_dir() { # NAME FOLDER
    [ ! -e "$2" ] || [ -d "$2" ] || die "$1=$2 is a file: name a folder"
    mkdir -p "$2" 2>/dev/null && [ -w "$2" ] || die "cannot write to $2: set $1 to a folder that you can write to"
    lock "$2"
    [ -e "$2/pyvenv.cfg" ] || [ -z "$(ls -A "$2")" ] ||
        die "$1=$2 exists and is not a virtual environment: name another folder, or empty it"
}

# torch/version.py says which build it is, and reading it does not import torch.
cuda_of_torch() {
    "$VENV_DIR/bin/python" -c 'import importlib.util as u, os, runpy
print(runpy.run_path(os.path.join(u.find_spec("torch").submodule_search_locations[0], "version.py"))["cuda"] or "")'
}

WANTS_CPU_BUILD="torch_npu needs torch's CPU build and ends a process that has the one for CUDA, which is what \
VENV_DIR=$VENV_DIR has or pip finds. The remedy: put PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before the command, \
or a folder with the wheel in PIP_FIND_LINKS, and delete that environment"

torch_npu_pin() { sed -n 's/^torch-npu==//p' "$REQUIREMENTS/npu.txt"; }

# The simulator's environment is current when it lies over VENV_DIR and has the torch_npu that is pinned.
simulator_is_current() {
    [ -x "$NPU_VENV_DIR/bin/python" ] && "$NPU_VENV_DIR/bin/python" - "$(torch_npu_pin)" "$("$VENV_DIR/bin/python" -c "$PRINT_SITE")" <<'PYTHON' 2>/dev/null
import sys
from importlib import metadata
pin, lower = sys.argv[1:]
sys.exit(not (lower in sys.path and metadata.version("torch-npu") == pin))
PYTHON
}
PRINT_SITE='import sysconfig; print(sysconfig.get_path("purelib"))'

# torch_npu's own needs (numpy, pyyaml) and torch are in the environment below: nothing else is installed.
make_simulator() {
    "$VENV_DIR/bin/python" -m venv --clear --without-pip "$NPU_VENV_DIR"
    "$VENV_DIR/bin/python" -c "$PRINT_SITE" >"$("$NPU_VENV_DIR/bin/python" -c "$PRINT_SITE")/layer.pth"
    say "installing torch_npu over $VENV_DIR (log: $NPU_VENV_DIR/install.log)"
    if ! "$VENV_DIR/bin/python" -m pip --python "$NPU_VENV_DIR/bin/python" install --no-input --disable-pip-version-check \
        --progress-bar off --no-deps --only-binary :all: "torch-npu==$(torch_npu_pin)" >"$NPU_VENV_DIR/install.log" 2>&1; then
        tail -n 5 "$NPU_VENV_DIR/install.log" >&2
        die "pip could not install torch_npu (the lines above are the end of $NPU_VENV_DIR/install.log)"
    fi
}

# The stamp holds what the environment was made from, so it goes stale by itself when a pin or the Python changes.
fingerprint() {
    {
        "$PYTHON_FOUND" -c 'import sys; print(sys.version, sys.base_prefix)'
        echo "$WITH_NPU"
        [ "$WITH_GPU" = no ] || echo "with CUDA"
        cat "$REQUIREMENTS"/*.txt
        [ "$STACK" = cann92 ] || cat "$ROOT/requirements/dev.txt"
    } | "$PYTHON_FOUND" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Neither stack is put over the other: what the first one drew in would stay, and nobody asked for the change.
check_stack() {
    local found=cann92
    compgen -G "$VENV_DIR/.stamp-*" >/dev/null || return 0
    [ ! -f "$VENV_DIR/.stack" ] || found="$(cat "$VENV_DIR/.stack")"
    [ "$found" = "$STACK" ] ||
        die "VENV_DIR=$VENV_DIR was made with STACK=$found, and STACK is $STACK: set STACK=$found, or name another VENV_DIR"
}

end_if_current() { # MESSAGE
    [ -x "$VENV_DIR/bin/python" ] && [ "$(cat "$VENV_DIR/.stamp-$LAYER" 2>/dev/null)" = "$WANTED" ] || return 0
    make_command
    say "$1"
    exit 0
}

# The folder itself is the lock: it survives --clear, and leaves no file behind.
lock() { # FOLDER
    command -v flock >/dev/null 2>&1 || return 0
    exec 9<"$1"
    flock 9
}

make_venv() {
    "$PYTHON_FOUND" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$PYTHON_FOUND cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)"
    # Without a stamp the folder is new or what an interrupted install left: neither is worth keeping.
    if ! compgen -G "$VENV_DIR/.stamp-*" >/dev/null || ! "$VENV_DIR/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making $VENV_DIR with $("$PYTHON_FOUND" --version)"
        "$PYTHON_FOUND" -m venv --clear "$VENV_DIR"
    fi
}

# Prints version and build (cpu, cuda) of the torch that pip would take.
find_torch() { # REQUIREMENT
    "$VENV_DIR/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off --quiet --dry-run --ignore-installed \
        --no-deps --report - "$1" 2>"$VENV_DIR/install.log" | "$VENV_DIR/bin/python" -c '
import json, sys
found = json.load(sys.stdin)["install"][0]["metadata"]
of_cuda = any(need.startswith(("nvidia", "cuda")) for need in found.get("requires_dist", []))
print(found["version"], "cuda" if of_cuda else "cpu")' 2>/dev/null
}

has_torch() { # an environment keeps the build that it has
    [[ "$("$VENV_DIR/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)+" = "$RELEASE+"* ]]
}

# One look of 5 s: behind a wall, pip would try for minutes. A pipe to `grep -q` would end pip before its last line, now and then.
cpu_index_has() { # VERSION
    local known
    [ "$TORCH_CPU_INDEX" != no ] && known="$(timeout 5 "$VENV_DIR/bin/python" -m pip index versions \
        --disable-pip-version-check --retries 0 --index-url "$TORCH_CPU_INDEX" torch 2>/dev/null)" && grep -qF "$1" <<<"$known"
}

# Sets TORCH to the requirement of the build that this machine wants; from TORCH_CPU_INDEX torch alone is installed here.
choose_torch() {
    local version build
    TORCH="${RELEASE:+torch==$RELEASE}"
    [ "$WITH_GPU" = no ] && [ -n "$RELEASE" ] && ! has_torch || return 0
    read -r version build < <(find_torch "$TORCH") || fail_of_pip
    if [ "$build" = cuda ] && [ "$version" != "$RELEASE" ]; then # an index of the user's has several builds, or this one
        read -r version build < <(find_torch "$TORCH+cpu") || true
    fi
    if [ "$build" = cpu ]; then
        TORCH="torch==$version"
    elif [ "$version" = "$RELEASE" ] && cpu_index_has "$RELEASE+cpu" && install_cpu_torch "$RELEASE+cpu"; then
        TORCH="$TORCH+cpu"
    elif [ "$WITH_NPU" = yes ]; then
        die "$WANTS_CPU_BUILD"
    else
        say "torch will be its build for CUDA, because pip finds no CPU build and TORCH_CPU_INDEX=$TORCH_CPU_INDEX has none that can be had: the environment takes 5.5 GB instead of 2.5, and the device tests are skipped"
    fi
}

install_cpu_torch() { # VERSION
    say "installing torch $1 from $TORCH_CPU_INDEX"
    "$VENV_DIR/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off --no-deps \
        --index-url "$TORCH_CPU_INDEX" "torch==$1" >"$VENV_DIR/install.log" 2>&1
}

fail_of_pip() {
    tail -n 25 "$VENV_DIR/install.log" >&2
    die "pip could not install the packages (the lines above are the end of $VENV_DIR/install.log): check the network and the disk, then run this again"
}

install_packages() {
    local files=(-r "$REQUIREMENTS/base.txt")
    [ "$LAYER" = base ] || files+=(-r "$ROOT/requirements/$LAYER.txt")
    local added=""
    [ "$WITH_NPU" = no ] || files+=(-r "$REQUIREMENTS/npu.txt") added=" and torch_npu"
    [ "$WITH_GPU" = no ] || files+=(-r "$REQUIREMENTS/cuda.txt") added=" with CUDA"
    say "installing the $LAYER layer of $STACK$added (a few minutes the first time; log: $VENV_DIR/install.log)"
    choose_torch
    # The pinned torch rides in the same command as everything else, so no other build can be drawn in by a dependency.
    "$VENV_DIR/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        -c "$REQUIREMENTS/constraints.txt" "${files[@]}" $TORCH >"$VENV_DIR/install.log" 2>&1 || fail_of_pip
}

# Not every index has the same build under a version.
check_build() {
    [ "$WITH_NPU" = no ] || [ -z "$RELEASE" ] || [ -z "$(cuda_of_torch)" ] || die "$WANTS_CPU_BUILD"
    [ "$WITH_GPU" = no ] || [ -n "$(cuda_of_torch)" ] ||
        die "this machine has an NVIDIA driver, and the torch that pip installed is built without CUDA: put PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu130 before the command"
}

# `vllm` runs the engine of this checkout from any directory. The file is the same on every run, and written only when it differs.
make_command() {
    local command="$VENV_DIR/bin/vllm" text
    text="$(printf '#!/usr/bin/env bash\n# Written by tools/setup_env.sh.\nPYTHONPATH=%q"${PYTHONPATH:+:$PYTHONPATH}" exec %q -P -m vllm.entrypoints.cli.main "$@"' \
        "$ROOT" "$(cd "$VENV_DIR" && pwd)/bin/python")"
    [ "$(cat "$command" 2>/dev/null)" != "$text" ] || return 0
    if echo "$text" >"$command.$$" && chmod +x "$command.$$"; then
        mv -f "$command.$$" "$command"
    else
        say "cannot write $command: run python -m vllm.entrypoints.cli.main instead of vllm"
    fi
}

if [ "$LAYER" = python ]; then
    find_python
    exit 0
fi
if [ "$LAYER" = command ]; then
    [ -x "$VENV_DIR/bin/python" ] || die "no environment in VENV_DIR=$VENV_DIR: run tools/setup_env.sh first"
    make_command
    say "the command is $VENV_DIR/bin/vllm"
    exit 0
fi
check_path VENV_DIR "$VENV_DIR"
check_stack
if [ "$LAYER" = simulator ]; then
    [ "$STACK" = cann92 ] || die "the simulated devices are for STACK=cann92: torch-npu 2.5.1.post1 does not run on them"
    NPU_VENV_DIR="${NPU_VENV_DIR:-$ROOT/.venv-npu}"
    check_path NPU_VENV_DIR "$NPU_VENV_DIR"
    [ -x "$VENV_DIR/bin/python" ] || die "no environment in VENV_DIR=$VENV_DIR to put it over: run tools/setup_env.sh dev first"
    [ -z "$(cuda_of_torch)" ] || die "$WANTS_CPU_BUILD"
    if ! simulator_is_current; then
        lock_venv_dir NPU_VENV_DIR "$NPU_VENV_DIR"
        simulator_is_current || make_simulator
        simulator_is_current || die "the environment in $NPU_VENV_DIR lacks torch_npu, or does not lie over $VENV_DIR: delete it and run this again"
    fi
    say "$NPU_VENV_DIR is up to date (simulator)"
    exit 0
fi

PYTHON_FOUND="$(find_python)"
WITH_NPU=no
if has_npu; then WITH_NPU=yes; fi
WITH_GPU=no
if has_gpu && [ "$WITH_NPU" = no ]; then
    if [ "$STACK" = cann92 ]; then WITH_GPU=yes; else say "the NVIDIA driver of this machine is not used: STACK=$STACK is for NPUs"; fi
fi
WANTED="$(fingerprint)"
RELEASE="$(sed -n 's/^torch==//p' "$REQUIREMENTS/base.txt")"

end_if_current "$VENV_DIR is up to date ($LAYER)"
lock_venv_dir VENV_DIR "$VENV_DIR"
end_if_current "$VENV_DIR was made by another run"
started=$SECONDS
trap 'say "stopped: the same command starts the set-up again"; exit 130' INT
make_venv
rm -f "$VENV_DIR"/.stamp-*
echo "$STACK" >"$VENV_DIR/.stack"
install_packages
check_build
make_command
for layer in base "$LAYER"; do
    echo "$WANTED" >"$VENV_DIR/.stamp-$layer.tmp"
    mv "$VENV_DIR/.stamp-$layer.tmp" "$VENV_DIR/.stamp-$layer"
done
say "ready in $((SECONDS - started)) s: $VENV_DIR/bin/python"
