#!/usr/bin/env bash
# DeepSeek-R1-Zero with one command: makes the environment, then runs the whole job (see --help). The same script runs
# on every node: NNODES=16 MASTER_ADDR=<head's address> bash recipes/r1_zero/ray_start_grpo_npu.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" r1_zero "$@"
