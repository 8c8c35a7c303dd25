#!/usr/bin/env bash
# cann-recipes-train's run of this name: DeepSeek-V3 671B on 256 dies from sharded weights. On every node:
#   MASTER_ADDR=<head's address> MODEL_PATH=/models/DeepSeek-V3 DIST_CKPT_PATH=/shared/your_sharded_weights bash <this script>
export CONFIG_NAME="${CONFIG_NAME:-cann_true_weight_671b_256die}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" r1_zero "$@"
