#!/usr/bin/env bash
# DeepSeek-R1 with dynamic sampling, by one command: data, weights to torch-dist shards, training (see --help). Without an
# accelerator a tiny DeepSeek-V3 runs through all of it. HOSTFILE starts every node from one; recipes/common/slurm.sh
# starts it under Slurm; or the same script is run on every node.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" r1_dynamic_sampling "$@"
