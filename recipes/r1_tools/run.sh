#!/usr/bin/env bash
# GRPO with tools in one command (see --help): without MODEL_PATH a tiny Qwen3 on a CPU in minutes, with it any model that
# the engines know. The same script runs on every node.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" r1_tools "$@"
