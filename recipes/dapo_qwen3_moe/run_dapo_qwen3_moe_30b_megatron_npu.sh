#!/usr/bin/env bash
# DAPO of Qwen3-30B-A3B by one command: data, weights to torch-dist shards, training (see --help). Without an NPU a tiny
# Qwen3-MoE runs through all of it. The same script runs on every node.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" dapo_qwen3_moe "$@"
