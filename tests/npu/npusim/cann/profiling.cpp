// CANN's profiling interface (aclprof*): it accepts every call and records nothing of a device, so that torch_npu.profiler
// runs and writes what it sees on the host.
#include <cstddef>
#include <cstdint>

namespace {
struct Config {
    int unused;
};
Config the_config;
}  // namespace

extern "C" {
int aclprofInit(const char*, size_t) { return 0; }
int aclprofFinalize() { return 0; }
int aclprofStart(const void*) { return 0; }
int aclprofStop(const void*) { return 0; }
int aclprofWarmup(const void*) { return 0; }
void* aclprofCreateConfig(uint32_t*, uint32_t, int, const void*, uint64_t) { return &the_config; }
int aclprofDestroyConfig(const void*) { return 0; }
int aclprofSetConfig(int, const char*, size_t) { return 0; }
int aclprofGetSupportedFeatures(size_t* size, void** features) {
    *size = 0;
    *features = nullptr;
    return 0;
}
int aclprofGetSupportedFeaturesV2(size_t* size, void** features) { return aclprofGetSupportedFeatures(size, features); }
int aclprofRegisterDeviceCallback() { return 0; }
int aclprofMarkEx(const char*, size_t, void*) { return 0; }
}
