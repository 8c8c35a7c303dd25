// Device memory of the fake libascendcl.so is host memory with a budget per device: plain allocations, pinned host
// memory, and the virtual memory calls behind the allocator's expandable segments.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "simulator.h"

namespace npusim {
namespace {

constexpr size_t GRANULE = 512;              // CANN rounds plain allocations up to this
constexpr size_t PHYSICAL_GRANULE = 2 << 20;  // and physical memory to 2 MiB pages

struct Block {
    size_t bytes;
    int device;
};
struct Physical {
    size_t bytes;
    int device;
};

std::mutex mutex;
std::map<uintptr_t, Block> device_blocks;  // plain allocations and mapped ranges, by address
std::map<uintptr_t, Block> host_blocks;    // pinned host memory
std::map<uintptr_t, size_t> reserved;      // virtual address ranges
std::map<int, size_t> used_bytes;          // by device

size_t round_up(size_t bytes, size_t granule) { return (bytes + granule - 1) / granule * granule; }

const Block* find(const std::map<uintptr_t, Block>& blocks, uintptr_t address, uintptr_t* start) {
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) return nullptr;
    --after;
    if (address >= after->first + after->second.bytes) return nullptr;
    if (start) *start = after->first;
    return &after->second;
}

// Call with the mutex held.
aclError charge(int device, size_t bytes) {
    if (used_bytes[device] + bytes > settings().device_bytes)
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d: %zu bytes asked for, %zu of %zu in use", device, bytes,
                    used_bytes[device], settings().device_bytes);
    used_bytes[device] += bytes;
    return ACL_SUCCESS;
}

}  // namespace
}  // namespace npusim

using namespace npusim;

extern "C" {

int npusim_is_live(const void* pointer, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    const uintptr_t end = address + bytes;
    while (address < end) {  // a tensor of an expandable segment may lie over several mapped ranges
        uintptr_t start = 0;
        const Block* block = find(device_blocks, address, &start);
        if (!block) return 0;
        address = start + block->bytes;
    }
    return 1;
}

int npusim_current_device() { return current_device(); }
int npusim_take_memory(int device, long long bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    if (bytes > 0) return charge(device, static_cast<size_t>(bytes));
    used_bytes[device] -= static_cast<size_t>(-bytes);
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
    const size_t rounded = round_up(bytes ? bytes : 1, GRANULE);
    const int device = current_device();
    std::lock_guard<std::mutex> lock(mutex);
    if (aclError code = charge(device, rounded)) return code;
    if (posix_memalign(pointer, GRANULE, rounded)) {
        used_bytes[device] -= rounded;
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no %zu bytes left for fake device memory", rounded);
    }
    device_blocks[reinterpret_cast<uintptr_t>(*pointer)] = {rounded, device};
    return ACL_SUCCESS;
}
aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(pointer, bytes, policy);
}
aclError aclrtFree(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto block = device_blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (block == device_blocks.end()) return fail(107000, "aclrtFree of %p, which is not allocated", pointer);
    used_bytes[block->second.device] -= block->second.bytes;
    device_blocks.erase(block);
    free(pointer);
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** pointer, size_t bytes) {
    if (posix_memalign(pointer, 64, bytes ? bytes : 64))
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no %zu bytes left to pin", bytes);
    std::lock_guard<std::mutex> lock(mutex);
    host_blocks[reinterpret_cast<uintptr_t>(*pointer)] = {bytes ? bytes : 64, -1};
    return ACL_SUCCESS;
}
aclError aclrtFreeHost(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    host_blocks.erase(reinterpret_cast<uintptr_t>(pointer));
    free(pointer);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    *total_bytes = settings().device_bytes;
    *free_bytes = *total_bytes - used_bytes[current_device()];
    return ACL_SUCCESS;
}
aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
    memset(attributes, 0, sizeof *attributes);
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex);
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    if (const Block* block = find(device_blocks, address, nullptr)) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
        attributes->location.id = block->device;
    } else if (find(host_blocks, address, nullptr)) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
    }
    return ACL_SUCCESS;
}

// ---- copies
aclError aclrtMemcpy(void* to, size_t capacity, const void* from, size_t bytes, aclrtMemcpyKind) {
    if (bytes > capacity) return fail(107000, "copy of %zu bytes into %zu", bytes, capacity);
    memmove(to, from, bytes);
    return ACL_SUCCESS;
}
aclError aclrtMemset(void* to, size_t capacity, int32_t value, size_t bytes) {
    if (bytes > capacity) return fail(107000, "fill of %zu bytes into %zu", bytes, capacity);
    memset(to, value, bytes);
    return ACL_SUCCESS;
}
// The executor's kernels do not come here: these serve torch_npu's own copies of whole storages.
aclError aclrtMemcpyAsync(void* to, size_t capacity, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream) {
    if (capturing()) return fail(107030, "a raw memory copy inside a capture is not simulated");
    return aclrtMemcpy(to, capacity, from, bytes, kind);
}
aclError aclrtMemsetAsync(void* to, size_t capacity, int32_t value, size_t bytes, aclrtStream) {
    if (capturing()) return fail(107030, "a raw memory fill inside a capture is not simulated");
    return aclrtMemset(to, capacity, value, bytes);
}

// ---- virtual memory: addresses are reserved without access, mapping physical memory gives access and is charged
aclError aclrtReserveMemAddress(void** pointer, size_t bytes, size_t, void*, uint64_t) {
    void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "cannot reserve %zu bytes of addresses", bytes);
    std::lock_guard<std::mutex> lock(mutex);
    reserved[reinterpret_cast<uintptr_t>(range)] = bytes;
    *pointer = range;
    return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto range = reserved.find(reinterpret_cast<uintptr_t>(pointer));
    if (range == reserved.end()) return fail(107000, "release of %p, which is not reserved", pointer);
    munmap(pointer, range->second);
    reserved.erase(range);
    return ACL_SUCCESS;
}
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* properties, uint64_t) {
    const size_t rounded = round_up(bytes, PHYSICAL_GRANULE);
    const int device = properties ? static_cast<int>(properties->location.id) : current_device();
    std::lock_guard<std::mutex> lock(mutex);
    if (aclError code = charge(device, rounded)) return code;
    *handle = reinterpret_cast<aclrtDrvMemHandle>(new Physical{rounded, device});
    return ACL_SUCCESS;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    auto* physical = reinterpret_cast<Physical*>(handle);
    std::lock_guard<std::mutex> lock(mutex);
    used_bytes[physical->device] -= physical->bytes;
    delete physical;
    return ACL_SUCCESS;
}
aclError aclrtMapMem(void* pointer, size_t bytes, size_t, aclrtDrvMemHandle handle, uint64_t) {
    if (mprotect(pointer, bytes, PROT_READ | PROT_WRITE)) return fail(107000, "cannot map %zu bytes at %p", bytes, pointer);
    std::lock_guard<std::mutex> lock(mutex);
    device_blocks[reinterpret_cast<uintptr_t>(pointer)] = {bytes, reinterpret_cast<Physical*>(handle)->device};
    return ACL_SUCCESS;
}
aclError aclrtUnmapMem(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto block = device_blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (block == device_blocks.end()) return fail(107000, "unmap of %p, which is not mapped", pointer);
    // A fresh anonymous mapping gives the pages back to the host and takes the access away.
    mmap(pointer, block->second.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    device_blocks.erase(block);
    return ACL_SUCCESS;
}
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "sharing device memory between processes is not simulated");
}
aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "sharing device memory between processes is not simulated");
}
aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "sharing device memory between processes is not simulated");
}

}  // extern "C"
