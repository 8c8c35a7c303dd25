// Graph capture of the fake libascendcl.so (aclmdlRI*): a graph is the list of tasks that were issued while a stream
// was capturing; running it runs them again, in order, on the same memory. A task group is a part of that list whose
// tasks an update replaces by the same ops with other arguments. A graph that has to wait (for an external event, which
// torch_npu makes of a value in memory) stands still there, and goes on when what it waits for has happened.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "simulator.h"

namespace npusim {
namespace {

using Tasks = std::vector<npusim_task>;

std::atomic<bool> exiting{false};
std::atomic<uint32_t> next_graph_id{1};

void undo(Tasks& tasks) {
    for (auto task = tasks.rbegin(); task != tasks.rend(); ++task)
        if (task->undo) task->undo(task->state);
}
void drop(Tasks& tasks) {
    for (npusim_task& task : tasks)
        if (!exiting) task.drop(task.state);
    tasks.clear();
}

}  // namespace

// A run of tasks; a group's are between the begin and the end of the group.
struct Section {
    Tasks tasks;
    bool is_group = false;
};

struct Graph {
    int device;
    std::vector<std::unique_ptr<Section>> sections;
    uint32_t id = next_graph_id++;  // torch_npu's allocator knows by it what belongs to a graph's pool
    Section* add_section(bool is_group) {
        sections.push_back(std::make_unique<Section>());
        sections.back()->is_group = is_group;
        return sections.back().get();
    }
    ~Graph() {
        for (auto& section : sections) drop(section->tasks);
        take_stream(device, -1);
    }
};

namespace {

// The process captures one graph at a time: all work of the process goes into it, whatever its stream.
std::mutex mutex;
Graph* captured = nullptr;    // between CaptureBegin and CaptureEnd
Stream* capture_stream = nullptr;
std::vector<Stream*> joined;  // the other streams of the capture
Section* updated = nullptr;   // between UpdateBegin and UpdateEnd
Tasks replacements;           // the tasks of the update
std::atomic<bool> recording{false};

// One run of a graph that stands still: it goes on at this task of this section. Its stream stands still with it.
struct Standstill {
    Graph* graph;
    aclrtStream stream;
    size_t section, task;
};
std::vector<Standstill> standstills;

aclError run_from(Graph* graph, aclrtStream stream, size_t section, size_t task) {
    for (; section < graph->sections.size(); section++, task = 0) {
        for (; task < graph->sections[section]->tasks.size(); task++) {
            const npusim_task current = graph->sections[section]->tasks[task];
            const int code = current.run(current.state);
            if (code == STOPS_HERE) {
                standstills.push_back({graph, stream, section, task});
                return ACL_SUCCESS;
            }
            if (code) return code;
        }
    }
    return ACL_SUCCESS;
}

Tasks& current_tasks() { return updated ? replacements : captured->sections.back()->tasks; }

}  // namespace

bool capturing() { return recording.load(); }

void wait_in_capture(Stream* waiting, const Event& event) {
    std::lock_guard<std::mutex> lock(mutex);
    Stream* other = event.recorded_on;
    if (!captured || !waiting || !other || other == waiting || other->capturing != captured) return;
    if (!waiting->capturing) {
        waiting->capturing = captured;
        joined.push_back(waiting);
    }
    other->is_apart = false;
}

aclError resume_graphs() {
    std::vector<Standstill> to_try;
    to_try.swap(standstills);
    for (const Standstill& still : to_try)
        if (aclError code = run_from(still.graph, still.stream, still.section, still.task)) return code;
    return ACL_SUCCESS;
}
aclError check_stream_moves(aclrtStream stream, const char* what) {
    const auto is_behind = [&](const Standstill& still) { return still.stream == stream; };
    if (capturing() || std::none_of(standstills.begin(), standstills.end(), is_behind)) return ACL_SUCCESS;
    return fail(507000, "%s on the stream of a graph that stands still, so behind it: a device would wait for ever; use "
                "another stream", what);
}
aclError check_nothing_is_stuck(const char* what) {
    if (standstills.empty() || capturing()) return ACL_SUCCESS;
    return fail(507000, "%s, while a graph waits for an external event that nobody has recorded: update the graph's task "
                "groups and record their events first", what);
}

}  // namespace npusim

using namespace npusim;

extern "C" {

int npusim_is_capturing() { return capturing(); }
int npusim_check_order(const char* op) { return check_nothing_is_stuck(op); }
void npusim_exiting() { exiting = true; }
int npusim_record(npusim_task task) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!captured && !updated) return fail(107029, "'%s' cannot be recorded: no stream is being captured", task.name);
    current_tasks().push_back(task);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
    std::lock_guard<std::mutex> lock(mutex);
    if (captured) return fail(107032, "the simulator captures one graph at a time");
    const int device = static_cast<Stream*>(stream)->device;
    if (aclError code = take_stream(device, 1)) return code;
    captured = new Graph{device};
    captured->add_section(false);
    capture_stream = static_cast<Stream*>(stream);
    capture_stream->capturing = captured;
    recording = true;
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* graph) {
    std::unique_lock<std::mutex> lock(mutex);
    if (!captured || capture_stream != stream) return fail(107029, "the stream is not being captured");
    Graph* finished = captured;
    captured = nullptr;
    capture_stream->capturing = nullptr;
    recording = false;
    bool is_whole = true;
    for (Stream* other : joined) {
        is_whole = is_whole && !other->is_apart;
        other->capturing = nullptr;
        other->is_apart = false;
    }
    joined.clear();
    lock.unlock();  // undoing calls back into the executor
    for (auto section = finished->sections.rbegin(); section != finished->sections.rend(); ++section) undo((*section)->tasks);
    if (!is_whole) {
        delete finished;
        return fail(107025, "the capture ends while a stream that joined it is apart: wait for it before");
    }
    *graph = finished;
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
    Graph* of_stream = stream ? static_cast<Stream*>(stream)->capturing : nullptr;
    // torch_npu asks before it allocates for a stream, so work on it follows. A stream that only waits is not apart.
    if (of_stream && stream != capture_stream) static_cast<Stream*>(stream)->is_apart = true;
    *status = of_stream ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (graph) *graph = of_stream;
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return ACL_SUCCESS; }
aclError aclmdlRIGetId(aclmdlRI graph, uint32_t* id) {
    *id = static_cast<Graph*>(graph)->id;
    return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream stream) {
    if (capturing()) return fail(107027, "a graph cannot be replayed inside a capture");
    if (aclError code = check_nothing_is_stuck("a graph is replayed")) return code;
    return run_from(static_cast<Graph*>(graph), stream, 0, 0);
}
aclError aclmdlRIDestroy(aclmdlRI graph) {
    standstills.erase(std::remove_if(standstills.begin(), standstills.end(), [&](const Standstill& s) { return s.graph == graph; }),
                      standstills.end());
    delete static_cast<Graph*>(graph);
    return ACL_SUCCESS;
}

// ---- task groups
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!captured) return fail(107029, "a task group begins outside a capture");
    if (captured->sections.back()->is_group) return fail(107032, "a task group begins inside another");
    captured->add_section(true);
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream, aclrtTaskGrp* handle) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!captured || !captured->sections.back()->is_group) return fail(107029, "a task group ends that has not begun");
    *handle = reinterpret_cast<aclrtTaskGrp>(captured->sections.back().get());
    captured->add_section(false);
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
    if (aclError code = check_stream_moves(stream, "an update of tasks")) return code;
    std::lock_guard<std::mutex> lock(mutex);
    if (captured || updated) return fail(107032, "an update begins inside a capture or another update");
    updated = reinterpret_cast<Section*>(handle);
    recording = true;
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream) {
    std::unique_lock<std::mutex> lock(mutex);
    if (!updated) return fail(107029, "an update ends that has not begun");
    Section* section = updated;
    Tasks fresh;
    fresh.swap(replacements);
    updated = nullptr;
    recording = false;
    lock.unlock();
    undo(fresh);
    const bool same_ops = std::equal(fresh.begin(), fresh.end(), section->tasks.begin(), section->tasks.end(),
                                     [](const npusim_task& a, const npusim_task& b) { return !strcmp(a.name, b.name); });
    if (same_ops) fresh.swap(section->tasks);
    const size_t recorded = same_ops ? fresh.size() : section->tasks.size(), given = fresh.size();
    drop(fresh);
    if (same_ops) return ACL_SUCCESS;
    return fail(207019, "an update may only repeat the ops of its task group with other arguments: the group has %zu, "
                "the update %zu, or their names differ", recorded, given);
}

}  // extern "C"
