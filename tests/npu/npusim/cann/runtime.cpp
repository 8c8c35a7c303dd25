// Devices, contexts, streams and events of the fake libascendcl.so: every stream runs its work at once, in the
// order of the calls, so events are always complete and waiting never blocks.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <sstream>

#include "simulator.h"

namespace npusim {
namespace {

constexpr const char* DEFAULT_SOC = "Ascend910B2";
constexpr const char* DEFAULT_CANN = "8.3.RC1";
constexpr const char* STREAMS_OF_A_DEVICE = "1984";
constexpr int MAX_DEVICES = 64;
constexpr int64_t CORES_PER_DEVICE = 24;
constexpr uintptr_t CONTEXT_BASE = 0x1000;

thread_local int thread_device = -1;
std::atomic<int> last_device{0};
std::atomic<int> next_stream_id{0};
std::atomic<int> streams_in_use[MAX_DEVICES];
// A fixed place: torch_npu keeps the pointer that it asked for and reads it after later errors.
thread_local char recent_error[4096];

std::string environment(const char* name, const char* fallback) {
    const char* value = getenv(name);
    return value && *value ? value : fallback;
}

Settings read_settings() {
    Settings s;
    const int count = atoi(environment("FAKE_NPU_COUNT", "2").c_str());
    s.device_bytes = static_cast<size_t>(atof(environment("FAKE_NPU_MEM_GB", "64").c_str()) * (1ull << 30));
    s.soc = environment("FAKE_NPU_SOC", DEFAULT_SOC);
    s.num_streams = atoi(environment("FAKE_NPU_STREAMS", STREAMS_OF_A_DEVICE).c_str());
    const char* listed = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!listed) {
        for (int device = 0; device < count; device++) s.visible.push_back(device);
        return s;
    }
    std::stringstream stream(listed);
    std::set<int> seen;
    for (std::string item; std::getline(stream, item, ',');) {
        char* end = nullptr;
        const long device = strtol(item.c_str(), &end, 10);
        const bool is_number = end != item.c_str() && *end == '\0';
        if (!is_number || device < 0 || device >= count || !seen.insert(static_cast<int>(device)).second) {
            s.visible.clear();
            s.visible_problem = std::string("ASCEND_RT_VISIBLE_DEVICES=") + listed + ": '" + item +
                                "' is not one of the devices 0.." + std::to_string(count - 1) + ", each at most once";
            return s;
        }
        s.visible.push_back(static_cast<int>(device));
    }
    return s;
}

uint64_t now() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

aclError refuse_in_capture(const Stream* stream, const char* what) {
    if (stream ? stream->capturing != nullptr : capturing())
        return fail(107030, "%s is not possible while a stream is being captured", what);
    return check_nothing_is_stuck(what);
}

// Work that orders streams. It is done at once, or becomes a task of the graph that is being captured.
using Ordering = std::function<int()>;  // 0 or STOPS_HERE

int run_ordering(void* state) { return (*static_cast<Ordering*>(state))(); }
void drop_ordering(void* state) { delete static_cast<Ordering*>(state); }

aclError submit(const char* name, aclrtStream stream, Ordering work) {
    if (aclError code = check_stream_moves(stream, name)) return code;
    if (capturing()) return npusim_record({run_ordering, nullptr, drop_ordering, new Ordering(std::move(work)), name});
    if (work() == STOPS_HERE)
        return fail(507000, "%s: it has not happened yet, and the simulator runs streams at once: do it first", name);
    return resume_graphs();
}

// What an event's handle points at: a graph that records an event or waits for it outlives torch_npu's handle.
using SharedEvent = std::shared_ptr<Event>;
SharedEvent as_event(aclrtEvent handle) { return *static_cast<SharedEvent*>(handle); }

}  // namespace

const Settings& settings() {
    static const Settings once = read_settings();
    return once;
}

aclError fail(aclError code, const char* format, ...) {
    char text[sizeof recent_error - 16];  // the arguments may hold the last error itself
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(recent_error, sizeof recent_error, "[npusim] %s", text);
    return code;
}

aclError take_stream(int device, int count) {
    if ((streams_in_use[device % MAX_DEVICES] += count) <= settings().num_streams || count < 0) return ACL_SUCCESS;
    streams_in_use[device % MAX_DEVICES] -= count;
    return fail(207008, "Insufficient_Stream_Resources(EL0009): the stream resources are insufficient: FAKE_NPU_STREAMS=%d",
                settings().num_streams);
}

int current_device() { return thread_device < 0 ? last_device.load() : thread_device; }

}  // namespace npusim

using namespace npusim;

extern "C" {

void npusim_set_error(const char* message) { fail(0, "%s", message); }
const char* npusim_current_op(const char* replacement) {
    static thread_local const char* op = nullptr;
    const char* before = op;
    op = replacement;
    return before;
}

// ---- process and errors
aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclGetRecentErrMsg() { return recent_error; }
const char* aclrtGetSocName() { return settings().soc.c_str(); }
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
    memset(version, 0, sizeof *version);
    strcpy(version->version, environment("FAKE_NPU_CANN", DEFAULT_CANN).c_str());
    return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char*, char* version) {
    strcpy(version, environment("FAKE_NPU_CANN", DEFAULT_CANN).c_str());
    return ACL_SUCCESS;
}
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

// ---- devices and contexts: a context is its device
aclError aclrtGetDeviceCount(uint32_t* count) {
    const Settings& s = settings();
    if (!s.visible_problem.empty()) {
        fprintf(stderr, "[npusim] %s\n", s.visible_problem.c_str());
        return fail(107001, "%s", s.visible_problem.c_str());
    }
    *count = static_cast<uint32_t>(s.visible.size());
    return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t device) {
    const int count = static_cast<int>(settings().visible.size());
    if (device < 0 || device >= count)
        return fail(107001, "device %d does not exist: this process sees %d device(s)", device, count);
    thread_device = device;
    last_device = device;
    return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* device) {
    if (thread_device < 0) return fail(107002, "this thread has no device yet");
    *device = thread_device;
    return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (thread_device < 0) return fail(107002, "this thread has no context yet");
    *context = reinterpret_cast<aclrtContext>(CONTEXT_BASE + thread_device);
    return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
    thread_device = static_cast<int>(reinterpret_cast<uintptr_t>(context) - CONTEXT_BASE);
    return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logical) {
    *logical = user;
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
    *value = CORES_PER_DEVICE;
    return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
    *value = CORES_PER_DEVICE;
    return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
    *can = 1;
    return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
    *pid = getpid();
    return ACL_SUCCESS;
}

// ---- streams
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
    if (aclError code = take_stream(current_device(), 1)) return code;
    *stream = new Stream{next_stream_id++, current_device()};
    return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream s) { return take_stream(static_cast<Stream*>(s)->device, -1); }
aclError aclrtDestroyStreamForce(aclrtStream s) { return aclrtDestroyStream(s); }
aclError aclrtSynchronizeStream(aclrtStream s) {
    return refuse_in_capture(static_cast<Stream*>(s), "synchronising the stream");
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream s, int32_t) { return aclrtSynchronizeStream(s); }
aclError aclrtSynchronizeDevice() { return refuse_in_capture(nullptr, "synchronising the device"); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream s, int32_t* id) {
    *id = s ? static_cast<Stream*>(s)->id : 0;
    return ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* arguments) {
    function(arguments);
    return ACL_SUCCESS;
}
aclError aclrtProcessReport(int32_t) { return ACL_SUCCESS; }

// ---- events
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
    *event = new SharedEvent(new Event{(flags & ACL_EVENT_EXTERNAL) != 0});
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) { return aclrtCreateEventExWithFlag(event, flags); }
aclError aclrtDestroyEvent(aclrtEvent event) {
    delete static_cast<SharedEvent*>(event);
    return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent e, aclrtStream stream) {
    as_event(e)->recorded_on = static_cast<Stream*>(stream);
    return submit("record event", stream, [event = as_event(e)] {
        event->is_recorded = true;
        event->nanoseconds = now();
        return 0;
    });
}
aclError aclrtResetEvent(aclrtEvent e, aclrtStream stream) {
    return submit("reset event", stream, [event = as_event(e)] {
        event->is_recorded = false;
        return 0;
    });
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent e) {
    wait_in_capture(static_cast<Stream*>(stream), *as_event(e));
    return submit("wait for event", stream, [event = as_event(e)] {
        return event->is_external && !event->is_recorded ? STOPS_HERE : 0;
    });
}
aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    return submit("write value", stream, [=] {
        *static_cast<volatile uint64_t*>(address) = value;
        return 0;
    });
}
aclError aclrtValueWait(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    return submit("wait for value", stream, [=] { return *static_cast<volatile uint64_t*>(address) == value ? 0 : STOPS_HERE; });
}
aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
    *milliseconds = (as_event(to)->nanoseconds - as_event(from)->nanoseconds) / 1e6f;
    return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
    *microseconds = as_event(event)->nanoseconds / 1000;
    return ACL_SUCCESS;
}

// ---- switches that have no meaning here: accepted and ignored
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
    *flag = 0;
    return ACL_SUCCESS;
}
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
    *value = 0;
    return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt, int64_t* value) {
    *value = 0;
    return ACL_SUCCESS;
}

}  // extern "C"
