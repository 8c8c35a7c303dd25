# HCCL, allocator and engine settings for Ascend NPUs: sourced by start.sh on machines that have some, and
# read by --print-plan. A variable that is already set keeps its value. One line each: export NAME="${NAME:-value}".

# Collectives. How long they wait for a peer follows actor_rollout_ref.nccl_timeout. Ports of the host side: chosen by the
# system, so that two jobs on a node do not meet; HCCL_IF_BASE_PORT would then not be read.
export HCCL_HOST_SOCKET_PORT_RANGE="${HCCL_HOST_SOCKET_PORT_RANGE:-auto}"
# Buffers in MB of the world and of the groups that dispatch tokens to experts; the sizes of others, and expansion on the
# vector cores, are options of these groups.
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-300}"

# Memory: segments that grow, so that sleep and wake do not fragment; large host blocks returned to the system (read by
# glibc's allocator, where jemalloc is not preloaded).
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-512768}"

# Each process keeps to its share of the machine's cores: by the number of its die, without a core for each thread, because
# CPU Adam has threads of its own. A container that shows other cores wants the form with ranges: 1,npu0:0-39,...
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"

# Launching: one-level task queue, the second level and captured graphs exclude each other; no debug modes; logs of errors
# only, to files.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"
export ASCEND_LAUNCH_BLOCKING="${ASCEND_LAUNCH_BLOCKING:-0}"
export ASCEND_GLOBAL_EVENT_ENABLE="${ASCEND_GLOBAL_EVENT_ENABLE:-0}"
export ASCEND_GLOBAL_LOG_LEVEL="${ASCEND_GLOBAL_LOG_LEVEL:-3}"
export ASCEND_SLOG_PRINT_TO_STDOUT="${ASCEND_SLOG_PRINT_TO_STDOUT:-0}"
