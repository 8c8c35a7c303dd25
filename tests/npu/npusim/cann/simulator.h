// What the files of the fake CANN runtime share: settings, errors, streams, and the seam for graph capture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "acl/acl.h"

namespace npusim {

// One physical device as the process sees it: index in `visible` is the logical device of this process.
struct Settings {
    std::vector<int> visible;     // ASCEND_RT_VISIBLE_DEVICES over FAKE_NPU_COUNT physical devices
    std::string visible_problem;  // why `visible` is empty although devices were asked for
    size_t device_bytes;          // FAKE_NPU_MEM_GB (may be a fraction)
    std::string soc;              // FAKE_NPU_SOC
    int num_streams;              // FAKE_NPU_STREAMS: of a device, for one process
};
const Settings& settings();

// Keeps the text for aclGetRecentErrMsg, which torch_npu appends to its exception, and returns the code.
aclError fail(aclError code, const char* format, ...) __attribute__((format(printf, 2, 3)));

int current_device();  // the calling thread's device, or the last one that any thread set

struct Graph;
struct Stream {
    int id;
    int device;
    Graph* capturing = nullptr;  // the graph that this stream records into, or that an update replaces tasks of
    bool is_apart = false;  // it joined a capture and was given work that no other stream has waited for
};

struct Event {
    bool is_external;  // may be waited for before it is recorded
    bool is_recorded = false;
    uint64_t nanoseconds = 0;
    Stream* recorded_on = nullptr;
};

// A device has a number of streams: every created stream takes one, and every captured graph until it is destroyed. With
// `count` 1 takes one of the device, or fails as CANN does; with -1 gives one back.
aclError take_stream(int device, int count);

bool capturing();  // is any stream of this process recording?
// A stream that waits for an event of a capturing one captures too, until the capture ends; the stream that began the
// capture has to wait for it before.
void wait_in_capture(Stream* waiting, const Event& event);
// Graphs that stand still because what they wait for has not happened: try again; or refuse to go past them, because on
// a device the host would now wait for ever.
aclError resume_graphs();
aclError check_nothing_is_stuck(const char* what);
aclError check_stream_moves(aclrtStream stream, const char* what);  // refuses work that such a graph would have to wait for
constexpr int STOPS_HERE = -1;  // a task's answer: the graph cannot go on yet

}  // namespace npusim

// The executor and the Python references reach the runtime through these C symbols.
extern "C" {

// A piece of device work as a graph keeps it. The device does nothing while a graph is captured, but the simulator has
// to run each piece once to learn its output shapes: `undo` takes that back when the capture ends.
struct npusim_task {
    int (*run)(void* state);    // does the work again; 0, or an error code after npusim_set_error
    void (*undo)(void* state);  // may be null
    void (*drop)(void* state);
    void* state;
    const char* name;  // outlives the task
};

int npusim_is_capturing();
int npusim_check_order(const char* op);  // 0, or an error when `op` would overtake a graph that stands still
void npusim_exiting();                   // from now on no task is run or dropped: Python is going away
int npusim_record(npusim_task task);  // the graph owns the state from then on
void npusim_set_error(const char* message);
const char* npusim_current_op(const char* replacement);  // sets this thread's op (may be null), returns the one before
int npusim_take_memory(int device, long long bytes);  // of the runtime's own on the device; negative bytes give it back
int npusim_current_device();
// Is [pointer, pointer + bytes) inside memory that is allocated and mapped now?
int npusim_is_live(const void* pointer, size_t bytes);
}
