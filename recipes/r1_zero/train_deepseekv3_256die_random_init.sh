#!/usr/bin/env bash
# The throughput benchmark of cann-recipes-train: random weights, evenly loaded experts, responses of full length; the summary
# at the end has tokens per second and device, and the phases' seconds. On NPUs DeepSeek-V3 671B on 256 dies (MODEL_PATH needs
# config and tokenizer only), elsewhere a tiny model on NPUS_PER_NODE processes.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if compgen -G "/dev/davinci[0-9]*" >/dev/null; then
    export CONFIG_NAME="${CONFIG_NAME:-cann_random_init_671b_256die}"
else
    export CONFIG_NAME="${CONFIG_NAME:-cann_random_init_tiny}"
fi
export OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/random_init}"
exec bash "$ROOT/recipes/common/start.sh" r1_zero "$@"
