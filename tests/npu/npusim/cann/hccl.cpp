// Fake libhccl.so: collectives between real processes through POSIX shared memory, finished when the call returns.
// A rank that does not come makes the others fail after the time-out instead of waiting for ever.
#include "hccl/hccl_types.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simulator.h"

namespace {

constexpr size_t SLOT_BYTES = 256 << 10;  // per rank: what it shows to the others in one round
constexpr size_t BOX_BYTES = 16 << 10;    // per ordered pair of ranks: point-to-point
constexpr uint32_t MAX_RANKS = 64;
constexpr uint32_t VECTOR_CORES = 3;  // hcclOpExpansionMode
constexpr int DEFAULT_EXEC_TIMEOUT_S = 1836, DEFAULT_CONNECT_TIMEOUT_S = 120;  // HCCL's own defaults
constexpr int DEFAULT_BUFFER_MIB = 200;
constexpr const char* PREFIX = "npusim_hccl_";

using Clock = std::chrono::steady_clock;
using Stream = void*;

struct Header {
    std::atomic<int> arrived, generation, broken;
    uint64_t counts[MAX_RANKS];
};
struct Box {
    std::atomic<int> full;
    uint64_t bytes;
    char data[BOX_BYTES];
};
struct Communicator {
    std::string name;
    uint32_t size, rank;
    int timeout_s;
    uint32_t expansion_mode;
    int device;
    long long buffer_bytes;  // on the device: one buffer to send from, one to receive into
    size_t mapped_bytes;
    Header* header;
    char* slots;
    Box* boxes;
    char* slot(uint32_t of_rank) const { return slots + of_rank * SLOT_BYTES; }
    Box& box(uint32_t from, uint32_t to) const { return boxes[from * size + to]; }
};

struct HcclFailure {
    HcclResult code;
};

[[noreturn]] void raise(HcclResult code, const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    npusim_set_error(text);
    fprintf(stderr, "[npusim] %s\n", text);
    throw HcclFailure{code};
}

int number_from(const char* variable, int fallback) {
    const char* value = getenv(variable);
    return value && atoi(value) > 0 ? atoi(value) : fallback;
}

// Consumes nothing; waits until `ready` holds; is unblocked by the other ranks, by a broken communicator, or by time.
template <class Ready>
void wait_until(Communicator& c, int timeout_s, const char* what, Ready ready) {
    const auto deadline = Clock::now() + std::chrono::seconds(timeout_s);
    for (int spins = 0; !ready(); spins++) {
        if (c.header->broken.load())
            raise(HCCL_E_REMOTE, "%s on rank %u of %u (%s): another rank gave up on this communicator", what, c.rank,
                  c.size, c.name.c_str());
        if (spins < 200) {
            sched_yield();
            continue;
        }
        if (Clock::now() > deadline) {
            c.header->broken = 1;
            raise(HCCL_E_TIMEOUT, "%s on rank %u of %u (%s): the other ranks did not come within %d s", what, c.rank,
                  c.size, c.name.c_str(), timeout_s);
        }
        usleep(50);
    }
}

void meet(Communicator& c, int timeout_s, const char* what) {
    if (c.size == 1) return;
    if (c.header->broken.load())
        raise(HCCL_E_REMOTE, "%s on rank %u of %u (%s): this communicator has failed before", what, c.rank, c.size,
              c.name.c_str());
    const int generation = c.header->generation.load();
    if (c.header->arrived.fetch_add(1) + 1 == static_cast<int>(c.size)) {
        c.header->arrived = 0;
        c.header->generation++;
        return;
    }
    wait_until(c, timeout_s, what, [&] { return c.header->generation.load() != generation; });
}
void meet(Communicator& c, const char* what) { meet(c, c.timeout_s, what); }

// ---- shared memory: the first rank's name, removed as soon as all ranks have it open
size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

void remove_leftovers() {  // of processes that died before all ranks had opened their segment
    DIR* folder = opendir("/dev/shm");
    if (!folder) return;
    while (dirent* entry = readdir(folder)) {
        int pid = 0;
        if (sscanf(entry->d_name, "npusim_hccl_%d_", &pid) == 1 && kill(pid, 0) != 0 && errno == ESRCH)
            shm_unlink((std::string("/") + entry->d_name).c_str());
    }
    closedir(folder);
}

// ---- what communicators were asked for: a line each, "ranks buffer_mib expansion_mode", 0 for HCCL's default
std::mutex settings_mutex;
std::string settings;

void note_settings(uint32_t size, const HcclCommConfig& config) {
    std::lock_guard<std::mutex> lock(settings_mutex);
    auto asked = [](uint32_t value, uint32_t unset) { return std::to_string(value == unset ? 0 : value) + " "; };
    settings += std::to_string(size) + " " + asked(config.hcclBufferSize, HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) +
                asked(config.hcclOpExpansionMode, HCCL_COMM_DEFAULT_OP_EXPANSION_MODE) + "\n";
}

std::unique_ptr<Communicator> open_communicator(const std::string& name, uint32_t size, uint32_t rank,
                                                const HcclCommConfig* config) {
    if (size == 0 || size > MAX_RANKS) raise(HCCL_E_PARA, "a communicator of %u ranks: 1 to %u are possible", size, MAX_RANKS);
    auto c = std::make_unique<Communicator>();
    c->name = name;
    c->size = size;
    c->rank = rank;
    c->timeout_s = number_from("HCCL_EXEC_TIMEOUT", DEFAULT_EXEC_TIMEOUT_S);
    if (config) note_settings(size, *config);
    c->expansion_mode = config ? config->hcclOpExpansionMode : HCCL_COMM_DEFAULT_OP_EXPANSION_MODE;
    const bool has_size = config && config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET;
    c->buffer_bytes = 2LL * (has_size ? config->hcclBufferSize : number_from("HCCL_BUFFSIZE", DEFAULT_BUFFER_MIB)) << 20;
    c->device = npusim_current_device();
    if (config && config->hcclExecTimeOut > 0) c->timeout_s = config->hcclExecTimeOut;
    c->mapped_bytes = aligned(sizeof(Header)) + size * SLOT_BYTES + size_t(size) * size * sizeof(Box);
    const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0) raise(HCCL_E_SYSCALL, "cannot open the shared memory %s: %s", name.c_str(), strerror(errno));
    // Reserving now turns a full /dev/shm into an error here instead of a SIGBUS later.
    const int reserved = posix_fallocate(file, 0, static_cast<off_t>(c->mapped_bytes));
    void* memory = reserved ? MAP_FAILED : mmap(nullptr, c->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) {
        shm_unlink(name.c_str());
        raise(HCCL_E_MEMORY, "no %zu bytes of shared memory (/dev/shm) for a communicator of %u ranks", c->mapped_bytes, size);
    }
    if (npusim_take_memory(c->device, c->buffer_bytes)) {
        munmap(memory, c->mapped_bytes);
        raise(HCCL_E_MEMORY, "no %lld bytes of the device for the buffers of a communicator of %u ranks", c->buffer_bytes, size);
    }
    c->header = static_cast<Header*>(memory);
    c->slots = static_cast<char*>(memory) + aligned(sizeof(Header));
    c->boxes = reinterpret_cast<Box*>(c->slots + size * SLOT_BYTES);
    try {
        meet(*c, number_from("HCCL_CONNECT_TIMEOUT", DEFAULT_CONNECT_TIMEOUT_S), "making the communicator");
    } catch (const HcclFailure&) {
        shm_unlink(name.c_str());
        munmap(memory, c->mapped_bytes);
        npusim_take_memory(c->device, -c->buffer_bytes);
        throw;
    }
    if (rank == 0) shm_unlink(name.c_str());
    return c;
}

// ---- elements
size_t element_size(HcclDataType dtype) {
    switch (dtype) {
        case HCCL_DATA_TYPE_INT8: case HCCL_DATA_TYPE_UINT8: case HCCL_DATA_TYPE_FP8E4M3: case HCCL_DATA_TYPE_FP8E5M2:
        case HCCL_DATA_TYPE_HIF8: return 1;
        case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32: return 4;
        default: return 8;
    }
}

struct BFloat16 {
    uint16_t bits;
    operator float() const {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    static BFloat16 of(float value) {  // round to nearest even
        if (std::isnan(value)) return {0x7fc0};
        uint32_t wide;
        memcpy(&wide, &value, sizeof wide);
        return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
    }
};

template <class T>
T combine(T a, T b, HcclReduceOp op) {
    switch (op) {
        case HCCL_REDUCE_SUM: return a + b;
        case HCCL_REDUCE_PROD: return a * b;
        case HCCL_REDUCE_MAX: return std::max(a, b);
        default: return std::min(a, b);
    }
}
template <class T>
void accumulate_as(char* total, const char* addend, size_t bytes, HcclReduceOp op) {
    auto* to = reinterpret_cast<T*>(total);
    const auto* from = reinterpret_cast<const T*>(addend);
    for (size_t i = 0; i < bytes / sizeof(T); i++) to[i] = combine<T>(to[i], from[i], op);
}
template <>
void accumulate_as<BFloat16>(char* total, const char* addend, size_t bytes, HcclReduceOp op) {
    auto* to = reinterpret_cast<BFloat16*>(total);
    const auto* from = reinterpret_cast<const BFloat16*>(addend);
    for (size_t i = 0; i < bytes / sizeof(BFloat16); i++) to[i] = BFloat16::of(combine<float>(to[i], from[i], op));
}
void accumulate(char* total, const char* addend, size_t bytes, HcclDataType dtype, HcclReduceOp op) {
    switch (dtype) {
        case HCCL_DATA_TYPE_FP32: return accumulate_as<float>(total, addend, bytes, op);
        case HCCL_DATA_TYPE_FP64: return accumulate_as<double>(total, addend, bytes, op);
        case HCCL_DATA_TYPE_FP16: return accumulate_as<_Float16>(total, addend, bytes, op);
        case HCCL_DATA_TYPE_BFP16: return accumulate_as<BFloat16>(total, addend, bytes, op);
        case HCCL_DATA_TYPE_INT64: return accumulate_as<int64_t>(total, addend, bytes, op);
        case HCCL_DATA_TYPE_INT32: return accumulate_as<int32_t>(total, addend, bytes, op);
        case HCCL_DATA_TYPE_INT16: return accumulate_as<int16_t>(total, addend, bytes, op);
        case HCCL_DATA_TYPE_INT8: return accumulate_as<int8_t>(total, addend, bytes, op);
        case HCCL_DATA_TYPE_UINT8: return accumulate_as<uint8_t>(total, addend, bytes, op);
        default: raise(HCCL_E_NOT_SUPPORT, "reduction of data type %d is not simulated", static_cast<int>(dtype));
    }
}

// ---- the algorithms. Each round: everybody writes its slot, all meet, everybody reads, all meet.
// `bytes` must be the same on all ranks; `write` and `read` get the round's offset and length.
template <class Write, class Read>
void rounds(Communicator& c, size_t bytes, const char* what, Write write, Read read) {
    for (size_t offset = 0; offset < bytes; offset += SLOT_BYTES) {
        const size_t length = std::min(SLOT_BYTES, bytes - offset);
        write(offset, length);
        meet(c, what);
        read(offset, length);
        meet(c, what);
    }
}

void all_gather(Communicator& c, const char* send, char* receive, size_t bytes) {
    rounds(c, bytes, "all_gather", [&](size_t o, size_t n) { memcpy(c.slot(c.rank), send + o, n); },
           [&](size_t o, size_t n) {
               for (uint32_t r = 0; r < c.size; r++) memcpy(receive + r * bytes + o, c.slot(r), n);
           });
}

void sum_slots(Communicator& c, char* total, size_t length, HcclDataType dtype, HcclReduceOp op) {
    memcpy(total, c.slot(0), length);
    for (uint32_t r = 1; r < c.size; r++) accumulate(total, c.slot(r), length, dtype, op);
}

void all_reduce(Communicator& c, const char* send, char* receive, size_t bytes, HcclDataType dtype, HcclReduceOp op) {
    rounds(c, bytes, "all_reduce", [&](size_t o, size_t n) { memcpy(c.slot(c.rank), send + o, n); },
           [&](size_t o, size_t n) { sum_slots(c, receive + o, n, dtype, op); });
}

void broadcast(Communicator& c, char* buffer, size_t bytes, uint32_t root) {
    rounds(c, bytes, "broadcast", [&](size_t o, size_t n) { if (c.rank == root) memcpy(c.slot(root), buffer + o, n); },
           [&](size_t o, size_t n) { if (c.rank != root) memcpy(buffer + o, c.slot(root), n); });
}

void reduce_scatter(Communicator& c, const char* send, char* receive, const std::vector<uint64_t>& bytes,
                    HcclDataType dtype, HcclReduceOp op) {
    std::vector<char> mine(bytes[c.rank]);  // receive may lie inside send
    uint64_t start = 0;
    for (uint32_t owner = 0; owner < c.size; start += bytes[owner++])
        rounds(c, bytes[owner], "reduce_scatter", [&](size_t o, size_t n) { memcpy(c.slot(c.rank), send + start + o, n); },
               [&](size_t o, size_t n) { if (c.rank == owner) sum_slots(c, mine.data() + o, n, dtype, op); });
    memcpy(receive, mine.data(), mine.size());
}

void scatter(Communicator& c, const char* send, char* receive, size_t bytes, uint32_t root) {
    for (uint32_t to = 0; to < c.size; to++)
        rounds(c, bytes, "scatter", [&](size_t o, size_t n) { if (c.rank == root) memcpy(c.slot(root), send + to * bytes + o, n); },
               [&](size_t o, size_t n) { if (c.rank == to) memcpy(receive + o, c.slot(root), n); });
}

struct Splits {  // in bytes, one per rank
    std::vector<uint64_t> sizes, starts;
};
Splits splits_of(const void* counts, const void* offsets, uint32_t ranks, size_t element) {
    Splits s;
    for (uint32_t r = 0; r < ranks; r++) {
        s.sizes.push_back(static_cast<const uint64_t*>(counts)[r] * element);
        s.starts.push_back(static_cast<const uint64_t*>(offsets)[r] * element);
    }
    return s;
}

void all_to_all(Communicator& c, const char* send, const Splits& out, char* receive, const Splits& in) {
    for (uint32_t shift = 0; shift < c.size; shift++) {
        const uint32_t to = (c.rank + shift) % c.size, from = (c.rank + c.size - shift) % c.size;
        c.header->counts[c.rank] = out.sizes[to];
        meet(c, "all_to_all");
        const uint64_t longest = *std::max_element(c.header->counts, c.header->counts + c.size);
        const uint64_t incoming = c.header->counts[from];
        if (incoming != in.sizes[from]) c.header->broken = 1;
        if (incoming != in.sizes[from])
            raise(HCCL_E_PARA, "all_to_all: rank %u sends %lu bytes to rank %u, which expects %lu", from,
                  static_cast<unsigned long>(incoming), c.rank, static_cast<unsigned long>(in.sizes[from]));
        meet(c, "all_to_all");
        rounds(c, longest, "all_to_all",
               [&](size_t o, size_t n) {
                   if (o < out.sizes[to]) memcpy(c.slot(c.rank), send + out.starts[to] + o, std::min<uint64_t>(n, out.sizes[to] - o));
               },
               [&](size_t o, size_t n) {
                   if (o < incoming) memcpy(receive + in.starts[from] + o, c.slot(from), std::min<uint64_t>(n, incoming - o));
               });
    }
}

void all_gather_v(Communicator& c, const char* send, char* receive, const Splits& in) {
    for (uint32_t owner = 0; owner < c.size; owner++)
        rounds(c, in.sizes[owner], "all_gather_v", [&](size_t o, size_t n) { if (c.rank == owner) memcpy(c.slot(owner), send + o, n); },
               [&](size_t o, size_t n) { memcpy(receive + in.starts[owner] + o, c.slot(owner), n); });
}

// Point-to-point: all transfers of a batch advance together, so that no order of sends and receives can block.
struct Transfer {
    bool is_send;
    char* buffer;
    uint64_t bytes;
    uint32_t peer;
    uint64_t done = 0;
    bool finished = false;
};

bool advance(Communicator& c, Transfer& t) {
    Box& box = t.is_send ? c.box(c.rank, t.peer) : c.box(t.peer, c.rank);
    if (t.is_send == static_cast<bool>(box.full.load())) return false;
    if (t.is_send) {
        box.bytes = std::min<uint64_t>(BOX_BYTES, t.bytes - t.done);
        memcpy(box.data, t.buffer + t.done, box.bytes);
    } else {
        memcpy(t.buffer + t.done, box.data, std::min(box.bytes, t.bytes - t.done));
    }
    t.done += box.bytes;
    box.full = t.is_send ? 1 : 0;
    t.finished = t.done >= t.bytes;
    return true;
}

void transfer(Communicator& c, std::vector<Transfer> transfers) {
    size_t left = transfers.size();
    while (left > 0) {
        bool moved = false;
        auto step = [&] {
            for (size_t i = 0; i < transfers.size(); i++) {
                Transfer& t = transfers[i];
                const bool is_first = std::none_of(transfers.begin(), transfers.begin() + i, [&](const Transfer& earlier) {
                    return !earlier.finished && earlier.is_send == t.is_send && earlier.peer == t.peer;
                });
                if (t.finished || !is_first || !advance(c, t)) continue;
                moved = true;
                left -= t.finished;
            }
            return moved;
        };
        wait_until(c, c.timeout_s, "send/recv", step);
    }
}

// ---- running: now, or recorded when a graph is being captured
using Work = std::function<void()>;

int run_work(void* state) {
    try {
        (*static_cast<Work*>(state))();
        return HCCL_SUCCESS;
    } catch (const HcclFailure& failure) {
        return failure.code;
    }
}
void drop_work(void* state) { delete static_cast<Work*>(state); }

HcclResult submit(const char* name, Work work) {
    if (npusim_is_capturing()) {
        return static_cast<HcclResult>(npusim_record({run_work, nullptr, drop_work, new Work(std::move(work)), name}));
    }
    return static_cast<HcclResult>(run_work(&work));
}

Communicator& of(HcclComm comm) { return *static_cast<Communicator*>(comm); }

template <class Make>
HcclResult guarded(Make make) {
    try {
        make();
        return HCCL_SUCCESS;
    } catch (const HcclFailure& failure) {
        return failure.code;
    }
}

}  // namespace

extern "C" {

// ---- communicators
const char* HcclGetErrorString(HcclResult code) {
    switch (code) {
        case HCCL_E_TIMEOUT: return "HCCL_E_TIMEOUT: a rank did not come in time (simulator)";
        case HCCL_E_REMOTE: return "HCCL_E_REMOTE: another rank gave up (simulator)";
        case HCCL_E_PARA: return "HCCL_E_PARA: the ranks disagree (simulator)";
        default: return "HCCL error (simulator)";
    }
}
HcclResult HcclGetRootInfo(HcclRootInfo* info) {
    static std::atomic<int> next{0};
    remove_leftovers();
    memset(info, 0, sizeof *info);
    snprintf(info->internal, sizeof info->internal, "/%s%d_%d_%ld", PREFIX, getpid(), next++,
             static_cast<long>(Clock::now().time_since_epoch().count()));
    return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config,
                                      HcclComm* comm) {
    return guarded([&] { *comm = open_communicator(info->internal, size, rank, config).release(); });
}
HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
    return HcclCommInitRootInfoConfig(size, info, rank, nullptr, comm);
}
HcclResult HcclCreateSubCommConfig(HcclComm* parent, uint32_t size, uint32_t*, uint64_t id, uint32_t rank,
                                   HcclCommConfig* config, HcclComm* comm) {
    return guarded([&] { *comm = open_communicator(of(*parent).name + "_" + std::to_string(id), size, rank, config).release(); });
}
const char* npusim_communicator_settings() {
    static thread_local std::string shown;
    std::lock_guard<std::mutex> lock(settings_mutex);
    shown = settings;
    return shown.c_str();
}
HcclResult HcclCommDestroy(HcclComm comm) {
    munmap(of(comm).header, of(comm).mapped_bytes);
    npusim_take_memory(of(comm).device, -of(comm).buffer_bytes);
    delete &of(comm);
    return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
    *size = of(comm).size;
    return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    *rank = of(comm).rank;
    return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm comm, char* name) {
    strncpy(name, of(comm).name.c_str(), 127);
    return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_OP_EXPANSION_MODE + 1; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGetConfig(HcclConfig, HcclConfigValue* value) {
    value->value = 0;
    return HCCL_SUCCESS;
}
HcclResult HcclGroupStart() { return HCCL_SUCCESS; }
HcclResult HcclGroupEnd() { return HCCL_SUCCESS; }

// ---- collectives
Communicator& taking(HcclComm comm, HcclDataType dtype) {  // on the vector cores they move and reduce no 64-bit types
    const bool is_wide = dtype == HCCL_DATA_TYPE_INT64 || dtype == HCCL_DATA_TYPE_UINT64 || dtype == HCCL_DATA_TYPE_FP64;
    if (of(comm).expansion_mode == VECTOR_CORES && is_wide)
        raise(HCCL_E_NOT_SUPPORT, "a collective of type %d on the vector cores, which take no 64-bit types", int(dtype));
    return of(comm);
}
Communicator& reducing(HcclComm comm, HcclDataType dtype) {  // CANN's lists of modes differ on int64: none is the safe reading
    if (element_size(dtype) == 8) raise(HCCL_E_NOT_SUPPORT, "a reduction of type %d: use 32 bits", int(dtype));
    return taking(comm, dtype);
}
HcclResult HcclBarrier(HcclComm comm, Stream) {
    return submit("HcclBarrier", [=] { meet(of(comm), "barrier"); });
}
HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclComm comm, Stream) {
    return submit("HcclAllGather", [=] {
        all_gather(taking(comm, dtype), static_cast<char*>(send), static_cast<char*>(receive), count * element_size(dtype));
    });
}
HcclResult HcclAllGatherV(void* send, uint64_t, void* receive, const void* counts, const void* offsets, HcclDataType dtype,
                          HcclComm comm, Stream) {
    const Splits in = splits_of(counts, offsets, of(comm).size, element_size(dtype));
    return submit("HcclAllGatherV", [=] { all_gather_v(taking(comm, dtype), static_cast<char*>(send), static_cast<char*>(receive), in); });
}
HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm comm, Stream) {
    return submit("HcclAllReduce", [=] {
        all_reduce(reducing(comm, dtype), static_cast<char*>(send), static_cast<char*>(receive), count * element_size(dtype), dtype, op);
    });
}
HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, uint32_t root,
                      HcclComm comm, Stream) {
    return submit("HcclReduce", [=] {
        std::vector<char> unwanted(of(comm).rank == root ? 0 : count * element_size(dtype));
        char* to = of(comm).rank == root ? static_cast<char*>(receive) : unwanted.data();
        all_reduce(reducing(comm, dtype), static_cast<char*>(send), to, count * element_size(dtype), dtype, op);
    });
}
HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm comm, Stream) {
    return submit("HcclBroadcast", [=] { broadcast(taking(comm, dtype), static_cast<char*>(buffer), count * element_size(dtype), root); });
}
HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm comm,
                             Stream) {
    return submit("HcclReduceScatter", [=] {
        const std::vector<uint64_t> bytes(of(comm).size, count * element_size(dtype));
        reduce_scatter(reducing(comm, dtype), static_cast<char*>(send), static_cast<char*>(receive), bytes, dtype, op);
    });
}
HcclResult HcclReduceScatterV(void* send, const void* counts, const void* offsets, void* receive, uint64_t, HcclDataType dtype,
                              HcclReduceOp op, HcclComm comm, Stream) {
    const Splits out = splits_of(counts, offsets, of(comm).size, element_size(dtype));
    return submit("HcclReduceScatterV", [=] {
        reduce_scatter(reducing(comm, dtype), static_cast<char*>(send), static_cast<char*>(receive), out.sizes, dtype, op);
    });
}
HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm comm, Stream) {
    return submit("HcclScatter", [=] {
        scatter(taking(comm, dtype), static_cast<char*>(send), static_cast<char*>(receive), count * element_size(dtype), root);
    });
}
HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets, HcclDataType send_dtype,
                         const void* receive, const void* receive_counts, const void* receive_offsets,
                         HcclDataType receive_dtype, HcclComm comm, Stream) {
    const Splits out = splits_of(send_counts, send_offsets, of(comm).size, element_size(send_dtype));
    const Splits in = splits_of(receive_counts, receive_offsets, of(comm).size, element_size(receive_dtype));
    return submit("HcclAlltoAllV", [=] {
        all_to_all(taking(comm, send_dtype), static_cast<const char*>(send), out, static_cast<char*>(const_cast<void*>(receive)), in);
    });
}
HcclResult HcclAlltoAll(const void* send, uint64_t count, HcclDataType dtype, const void* receive, uint64_t, HcclDataType,
                        HcclComm comm, Stream) {
    std::vector<uint64_t> counts(of(comm).size, count), offsets;
    for (uint32_t r = 0; r < of(comm).size; r++) offsets.push_back(r * count);
    return HcclAlltoAllV(send, counts.data(), offsets.data(), dtype, receive, counts.data(), offsets.data(), dtype, comm, nullptr);
}
HcclResult HcclAlltoAllVC(const void* send, const void* matrix, HcclDataType dtype, const void* receive, HcclDataType,
                          HcclComm comm, Stream) {
    const Communicator& c = of(comm);
    const auto* sends = static_cast<const uint64_t*>(matrix);  // [from][to]
    std::vector<uint64_t> out, out_starts, in, in_starts;
    uint64_t out_total = 0, in_total = 0;
    for (uint32_t r = 0; r < c.size; r++) {
        out.push_back(sends[c.rank * c.size + r]);
        in.push_back(sends[r * c.size + c.rank]);
        out_starts.push_back(out_total);
        in_starts.push_back(in_total);
        out_total += out.back();
        in_total += in.back();
    }
    return HcclAlltoAllV(send, out.data(), out_starts.data(), dtype, receive, in.data(), in_starts.data(), dtype, comm, nullptr);
}

// ---- point-to-point
HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm comm, Stream) {
    return submit("HcclSend", [=] { transfer(of(comm), {{true, static_cast<char*>(buffer), count * element_size(dtype), peer}}); });
}
HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm comm, Stream) {
    return submit("HcclRecv", [=] { transfer(of(comm), {{false, static_cast<char*>(buffer), count * element_size(dtype), peer}}); });
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, Stream) {
    std::vector<Transfer> transfers;
    for (uint32_t i = 0; i < count; i++)
        transfers.push_back({items[i].sendRecvType == HCCL_SEND, static_cast<char*>(items[i].buf),
                             items[i].count * element_size(items[i].dataType), items[i].remoteRank});
    return submit("HcclBatchSendRecv", [=] { transfer(of(comm), transfers); });
}

}  // extern "C"
