#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# slurm.sh RECIPE [argument ...]: a recipe's job on the nodes of a Slurm allocation, one launcher on each. From the root of
# the repository:  sbatch --nodes=16 --gpus-per-node=8 recipes/common/slurm.sh r1_dynamic_sampling [key=value ...]
# DRY_RUN=yes prints what would run. Variables of the recipe (its --help lists them) are taken from the environment.
set -euo pipefail

RECIPE="${1:?usage: sbatch --nodes=N recipes/common/slurm.sh RECIPE [key=value ...]}"
shift
if [ "${DRY_RUN:-no}" = yes ] && [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    export NNODES="${NNODES:-<nodes>}" MASTER_ADDR="${MASTER_ADDR:-<address of node 0>}" # an allocation says which
else
    : "${SLURM_JOB_NODELIST:?no Slurm allocation: start this with sbatch, or inside salloc}"
fi
# Slurm runs a copy of this file elsewhere: where it was submitted is the repository.
ROOT="${SLURM_SUBMIT_DIR:-$PWD}"
LAUNCH="$ROOT/recipes/common/start.sh"
if [ ! -f "$LAUNCH" ] || [ ! -d "$ROOT/recipes/$RECIPE" ]; then
    echo "error: no recipe $RECIPE in $ROOT/recipes: submit from the root of the repository" >&2
    exit 2
fi

# Node 0 of the list is the head, as srun numbers them. Its address, not its name, which may mean loopback there.
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    head="${nodes[0]}"
    export NNODES="${SLURM_JOB_NUM_NODES:-$SLURM_NNODES}"
    export MASTER_ADDR="${MASTER_ADDR:-$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname -I | awk '{print $1}')}"
fi

# SLURM_NODEID is each node's own, so it is read there.
command=(srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$@"' node "$LAUNCH" "$RECIPE" "$@")
echo "NNODES=$NNODES MASTER_ADDR=$MASTER_ADDR ${command[*]@Q}"
[ "${DRY_RUN:-no}" = yes ] || exec "${command[@]}"
