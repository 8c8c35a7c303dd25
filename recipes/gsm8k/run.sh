#!/usr/bin/env bash
# GRPO on GSM8K with one command (see --help): without MODEL_PATH a tiny Qwen3 on a CPU in minutes, with it any model that
# the engines know. The same script runs on every node.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" gsm8k "$@"
