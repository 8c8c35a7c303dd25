#!/usr/bin/env bash
# GRPO on MATH-lighteval with one command: data, weights to torch-dist shards, training, and back to Hugging Face form
# (see --help). Without an accelerator a tiny DeepSeek-V3 runs through all of it. The same script runs on every node.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" math_lighteval "$@"
