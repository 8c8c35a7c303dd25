// Gives torch_npu's "device" its arithmetic: every aten kernel of the npu backend is replaced by the CPU kernel of the
// same op, run on CPU tensors that share the fake device's memory. Allocation and views stay torch_npu's own. While a
// graph is captured, each call is also kept as a task that the graph can run again.
#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <unordered_set>

#include "../cann/simulator.h"

namespace {

using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

constexpr auto NPU = c10::DeviceType::PrivateUse1;

bool on_npu(const at::Tensor& t) { return t.defined() && t.device().type() == NPU; }

// ---- a CPU tensor over the same bytes
at::Tensor with_layout_of(const at::Tensor& t, c10::Storage storage) {
    auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(DispatchKey::CPU), t.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj()) alias._set_conj(true);
    if (t.is_neg()) alias._set_neg(true);
    return alias;
}
c10::Storage cpu_storage(c10::DataPtr data, size_t bytes) {
    return c10::Storage(c10::Storage::use_byte_size_t{}, bytes, std::move(data), c10::GetAllocator(c10::kCPU), true);
}
at::Tensor alias_on_cpu(const at::Tensor& t) {  // keeps the device memory alive
    auto* owner = new c10::Storage(t.storage());
    c10::DataPtr data(owner->mutable_data(), owner, [](void* p) { delete static_cast<c10::Storage*>(p); }, c10::kCPU);
    return with_layout_of(t, cpu_storage(std::move(data), owner->nbytes()));
}
at::Tensor unowned(const at::Tensor& alias) {  // a graph does not keep the memory of its tensors alive
    const auto& storage = alias.storage();
    return with_layout_of(alias, cpu_storage(c10::DataPtr(storage.mutable_data(), c10::kCPU), storage.nbytes()));
}

// ---- what was executed
std::mutex calls_mutex;
std::map<std::string, int64_t> calls;

std::string full_name(const c10::OperatorHandle& op) {
    const auto& overload = op.schema().overload_name();
    return op.schema().name() + (overload.empty() ? "" : "." + overload);
}
void write_down(const std::string& name) {  // for processes that end without a word, such as Ray's workers
    static const char* folder = getenv("FAKE_NPU_CALLS_DIR");
    if (!folder || !*folder) return;
    if (FILE* file = fopen((std::string(folder) + "/" + std::to_string(getpid()) + ".txt").c_str(), "a")) {
        fprintf(file, "%s\n", name.c_str());
        fclose(file);
    }
}
void count(const std::string& name) {
    std::lock_guard<std::mutex> lock(calls_mutex);
    if (calls[name]++ == 0) write_down(name);
}

// ---- the same by phase and by the types of an op's tensors, for a table of what each costs on a die
struct TypedCalls {
    std::mutex mutex;
    std::vector<std::string> phases;  // of torch.profiler.record_function, the innermost last
    std::map<std::string, int64_t> calls;  // "phase/inner phase<TAB>op<TAB>types"
};
TypedCalls& typed() {
    static auto* one = new TypedCalls;
    return *one;
}
std::string type_of(const at::Tensor& t) {
    const std::string dtype = c10::toString(t.scalar_type());
    if (on_npu(t)) return dtype;
    return (t.dim() == 0 ? "scalar:" : t.numel() == 0 || t.is_pinned() ? "pinned:" : "host:") + dtype;
}
// Types of a stack's last `number` values: "Float,Long" of the tensors, "None" where there is none.
template <class Values>
std::string types_of(const Values& stack, size_t number) {
    std::string types;
    auto add = [&](const at::Tensor& t) { types += (types.empty() ? "" : ",") + (t.defined() ? type_of(t) : "None"); };
    for (size_t i = stack.size() - number; i < stack.size(); i++) {
        const IValue& v = stack[i];
        if (v.isTensor()) add(v.toTensor());
        if (v.isTensorList())
            for (at::Tensor t : v.toTensorList()) add(t);
        if (v.isOptionalTensorList())
            for (std::optional<at::Tensor> t : v.toOptionalTensorList())
                if (t.has_value()) add(*t);
    }
    return types;
}
void count_locked(TypedCalls& all, const std::string& name, const std::string& types) {
    std::string key;
    for (const auto& phase : all.phases) key += (key.empty() ? "" : "/") + phase;
    all.calls[key + "\t" + name + "\t" + types]++;
}
void count_typed(const std::string& name, const std::string& types) {
    std::lock_guard<std::mutex> lock(typed().mutex);
    count_locked(typed(), name, types);
}
std::string lines_of(const TypedCalls& all) {
    std::string text;
    for (const auto& [key, times] : all.calls) text += key + "\t" + std::to_string(times) + "\n";
    return text;
}
void write_phases_down(const TypedCalls& all) {
    static const char* folder = getenv("FAKE_NPU_CALLS_DIR");
    if (!folder || !*folder) return;
    const std::string path = std::string(folder) + "/" + std::to_string(getpid()) + ".phases", fresh = path + ".new";
    if (FILE* file = fopen(fresh.c_str(), "w")) {
        fputs(lines_of(all).c_str(), file);
        fclose(file);
        rename(fresh.c_str(), path.c_str());
    }
}
std::unique_ptr<at::ObserverContext> enter_phase(const at::RecordFunction& range) {
    if (strncmp(range.name(), "micro_batch ", 12) == 0) return nullptr;  // a phase is counted for all of them
    std::lock_guard<std::mutex> lock(typed().mutex);
    typed().phases.push_back(range.name());
    count_locked(typed(), "", "");  // how often the phase itself came
    return nullptr;
}
void leave_phase(const at::RecordFunction& range, at::ObserverContext*) {
    std::lock_guard<std::mutex> lock(typed().mutex);
    auto& phases = typed().phases;
    const auto last = std::find(phases.rbegin(), phases.rend(), std::string(range.name()));
    if (last != phases.rend()) phases.erase(std::next(last).base());
    if (phases.empty()) write_phases_down(typed());
}
std::string report_typed_calls() {
    std::lock_guard<std::mutex> lock(typed().mutex);
    return lines_of(typed());
}

// ---- patterns that show the use of memory that nobody wrote: NaN in floats, -1 in integers
bool poison_is_on() {
    static const bool on = [] {
        const char* value = getenv("FAKE_NPU_POISON");
        return value && strcmp(value, "0") != 0;
    }();
    return on;
}
void fill_with_poison(const at::Tensor& npu_or_alias) {
    if (npu_or_alias.numel() == 0) return;
    const int pattern = npu_or_alias.scalar_type() == at::kBool ? 1 : 0xff;
    memset(npu_or_alias.storage().mutable_data(), pattern, npu_or_alias.storage().nbytes());
}

const std::unordered_set<std::string> MIXES_DEVICES = {
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_to_copy", "aten::copy",
    "aten::index.Tensor", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::set_"};

// One call of an op: its device tensors exchanged for CPU aliases, its results exchanged back.
class Call {
  public:
    explicit Call(const std::string& op) : op_(op), may_mix_(MIXES_DEVICES.count(op) > 0) {}

    IValue to_cpu(const IValue& v) {
        if (v.isTensor()) return alias(v.toTensor());
        if (v.isTensorList()) {
            c10::List<at::Tensor> list;
            for (at::Tensor t : v.toTensorList()) list.push_back(alias(t));
            return list;
        }
        if (v.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (std::optional<at::Tensor> t : v.toOptionalTensorList())
                list.push_back(t.has_value() ? std::optional<at::Tensor>(alias(*t)) : t);
            return list;
        }
        if (v.isDevice() && v.toDevice().type() == NPU) {
            device_ = v.toDevice();
            return c10::Device(c10::kCPU);
        }
        if (v.isDevice() && v.toDevice().is_cpu()) result_on_cpu_ = true;
        if (v.isGenerator()) {
            generator_ = v.toGenerator();
            TORCH_CHECK(generator_.device().type() == NPU, "Expected a 'npu' generator but found one of '",
                        generator_.device().type(), "' (op ", op_, ")");
            return IValue();  // the CPU's default generator, see RandomScope
        }
        return v;
    }

    void check_devices() const {
        TORCH_CHECK(may_mix_ || aliases_.empty() || !has_cpu_tensor_, "Expected all tensors to be on the same device, but found "
                    "at least two devices, ", device_, " and cpu! (op ", op_, ")");
        if (may_mix_) return;
        for (const auto& [device_tensor, alias] : aliases_)
            TORCH_CHECK(device_tensor.device() == aliases_.front().first.device(), "Expected all tensors to be on the same "
                        "device, but found at least two devices, ", aliases_.front().first.device(), " and ",
                        device_tensor.device(), "! (op ", op_, ")");
    }

    // An op that resizes its output gave the alias a new size or new memory: follow it on the device.
    void follow_resizes() {
        for (auto& [device_tensor, alias] : aliases_) {
            if (alias.numel() && alias.data_ptr() != device_tensor.data_ptr()) {
                device_tensor.resize_(alias.sizes());
                alias_on_cpu(device_tensor).copy_(alias);
            } else if (alias.sizes() != device_tensor.sizes()) {
                device_tensor.resize_(alias.sizes());
            }
        }
    }

    IValue to_device(const IValue& v) {
        if (v.isTensor()) return result(v.toTensor());
        if (v.isTensorList()) {
            c10::List<at::Tensor> list;
            for (at::Tensor t : v.toTensorList()) list.push_back(result(t));
            return list;
        }
        return v;
    }

    // The generator that an op of this call draws from.
    at::Generator generator() const {
        if (generator_.defined()) return generator_;
        return at::globalContext().defaultGenerator(c10::Device(NPU, device_.index()));
    }
    // One entry per result tensor: the new device tensor, or undefined where the result is or shares an argument.
    const std::vector<at::Tensor>& new_results() const { return new_results_; }
    bool crosses_devices() const { return has_cpu_tensor_ || result_on_cpu_; }
    const std::vector<at::Tensor>& cpu_tensors() const { return cpu_tensors_; }
    bool is_alias(const at::Tensor& t) const {
        return std::any_of(aliases_.begin(), aliases_.end(), [&](const auto& pair) { return pair.second.is_same(t); });
    }

  private:
    at::Tensor alias(const at::Tensor& t) {
        if (!on_npu(t)) {
            if (t.defined() && t.device().is_cpu() && t.dim() > 0) {
                has_cpu_tensor_ = true;
                cpu_tensors_.push_back(t);
            }
            return t;
        }
        for (const auto& [device_tensor, alias] : aliases_)
            if (device_tensor.is_same(t)) return alias;
        device_ = t.device();
        aliases_.emplace_back(t, alias_on_cpu(t));
        return aliases_.back().second;
    }

    at::Tensor result(const at::Tensor& r) {
        new_results_.emplace_back();
        if (!r.defined()) return r;
        for (const auto& [device_tensor, alias] : aliases_)
            if (alias.is_same(r)) return device_tensor;
        if (!r.device().is_cpu() || result_on_cpu_) return r;
        for (const auto& [device_tensor, alias] : aliases_)  // a view of an argument
            if (r.storage().unsafeGetStorageImpl() == alias.storage().unsafeGetStorageImpl())
                return device_tensor.as_strided(r.sizes(), r.strides(), r.storage_offset());
        auto made = at::empty_strided(r.sizes(), r.strides(), r.options().device(device_).pinned_memory(false));
        if (r.numel()) alias_on_cpu(made).copy_(r);
        new_results_.back() = made;
        return made;
    }

    std::string op_;
    bool may_mix_;
    c10::Device device_{NPU, -1};
    bool result_on_cpu_ = false, has_cpu_tensor_ = false;
    std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // device tensor, its alias
    std::vector<at::Tensor> new_results_, cpu_tensors_;
    at::Generator generator_;
};

// Inside, an op that draws from the CPU's default generator draws numbers that the device's generator decides: its seed
// and offset. Each draw moves the offset on, so seeds, offsets and saved states behave as on a device.
class RandomScope {
  public:
    explicit RandomScope(at::Generator device_generator) : lock_(mutex()), cpu_(at::detail::getDefaultCPUGenerator()) {
        uint64_t key = 0;  // while a graph is captured the numbers do not matter, and the generator must not move
        if (!npusim_is_capturing()) {
            std::lock_guard<std::mutex> device_lock(device_generator.mutex());
            const uint64_t offset = device_generator.get_offset();
            key = mixed(device_generator.current_seed() + offset * 0x9e3779b97f4a7c15ull);
            device_generator.set_offset(offset + OFFSET_STEP);
        }
        std::lock_guard<std::mutex> cpu_lock(cpu_.mutex());
        saved_ = cpu_.get_state();
        cpu_.set_current_seed(key);
    }
    ~RandomScope() {
        std::lock_guard<std::mutex> cpu_lock(cpu_.mutex());
        cpu_.set_state(saved_);
    }

  private:
    static constexpr uint64_t OFFSET_STEP = 4;  // the offsets of the device's generator are multiples of this
    static std::recursive_mutex& mutex() {
        static std::recursive_mutex one;
        return one;
    }
    static uint64_t mixed(uint64_t x) {  // SplitMix64's finaliser
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        return x ^ (x >> 31);
    }
    std::lock_guard<std::recursive_mutex> lock_;
    at::Generator cpu_;
    at::Tensor saved_;
};

void call_below_autograd(const c10::OperatorHandle& op, Stack* stack, const at::Generator& generator) {
    at::AutoDispatchBelowAutograd below;
    std::optional<RandomScope> random;
    if (generator.defined()) random.emplace(generator);
    op.callBoxed(*stack);
}

// ---- graph capture
void check_order(const std::string& op) {
    TORCH_CHECK(npusim_check_order(op.c_str()) == 0, aclGetRecentErrMsg());
}

template <class Visit>
void each_tensor(const IValue& v, Visit visit) {
    if (v.isTensor() && v.toTensor().defined()) visit(v.toTensor());
    if (v.isTensorList())
        for (at::Tensor t : v.toTensorList()) visit(t);
    if (v.isOptionalTensorList())
        for (std::optional<at::Tensor> t : v.toOptionalTensorList())
            if (t.has_value() && t->defined()) visit(*t);
}

const std::unordered_set<std::string> READ_BY_THE_HOST = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};

void refuse_what_cannot_be_captured(const c10::OperatorHandle& op, const Call& call, const Stack& stack, size_t first) {
    const auto& name = op.schema().name();
    TORCH_CHECK(!READ_BY_THE_HOST.count(name), name, " cannot be captured in a graph: the host needs its values or its size");
    for (const auto& t : call.cpu_tensors())
        TORCH_CHECK(t.is_pinned(), name, " cannot be captured in a graph: it copies from or to host memory that is not pinned");
    TORCH_CHECK(!call.crosses_devices() || !call.cpu_tensors().empty(), name,
                " cannot be captured in a graph: it copies to new host memory and waits");
    if (name == "aten::where")  // torch makes a tensor of the number
        for (size_t i : {1, 2})
            each_tensor(stack[first + i], [&](const at::Tensor& t) {
                TORCH_CHECK(t.dim() > 0, name, " with a number cannot be captured in a graph: a device copies it from host "
                            "memory that is gone at the replay; use masked_fill");
            });
    if (name != "aten::index" && name != "aten::index_put" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return;
    each_tensor(stack[first + 1], [&](const at::Tensor& index) {
        TORCH_CHECK(index.scalar_type() != at::kBool && index.scalar_type() != at::kByte, name,
                    " with a mask cannot be captured in a graph: the host needs the number of its true elements");
    });
}

class RecordedCall {
  public:
    // `stack` holds the CPU aliases that the call is about to run on.
    RecordedCall(const c10::OperatorHandle& op, const Call& call, const Stack& stack, size_t first, at::Generator generator,
                 std::string types)
        : op_(op), name_(full_name(op)), types_(std::move(types)), generator_(std::move(generator)) {
        const auto& arguments = op.schema().arguments();
        for (size_t i = 0; i < arguments.size(); i++) {
            const IValue& argument = stack[first + i];
            inputs_.push_back(without_ownership(argument, call));
            if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite())
                each_tensor(argument, [&](const at::Tensor& t) {
                    before_.emplace_back(call.is_alias(t) ? unowned(t) : t, t.clone());
                });
        }
    }
    void set_results(const std::vector<at::Tensor>& new_results) {
        for (const auto& t : new_results) results_.push_back(t.defined() ? unowned(alias_on_cpu(t)) : t);
    }
    npusim_task as_task() {
        return {[](void* self) { return static_cast<RecordedCall*>(self)->run(); },
                [](void* self) { static_cast<RecordedCall*>(self)->undo(); },
                [](void* self) { delete static_cast<RecordedCall*>(self); }, this, name_.c_str()};
    }

  private:
    // Device memory is not kept alive; scalars and pinned host memory are.
    static IValue without_ownership(const IValue& v, const Call& call) {
        auto exchanged = [&](const at::Tensor& t) { return call.is_alias(t) ? unowned(t) : t; };
        if (v.isTensor()) return exchanged(v.toTensor());
        if (v.isTensorList()) {
            c10::List<at::Tensor> list;
            for (at::Tensor t : v.toTensorList()) list.push_back(exchanged(t));
            return list;
        }
        if (v.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (std::optional<at::Tensor> t : v.toOptionalTensorList())
                list.push_back(t.has_value() ? std::optional<at::Tensor>(exchanged(*t)) : t);
            return list;
        }
        return v;
    }
    int run() {
        try {
            for (const auto& input : inputs_) each_tensor(input, [&](const at::Tensor& t) { check_is_live(t); });
            for (const auto& result : results_)
                if (result.defined()) check_is_live(result);
            count(name_);
            count_typed(name_, types_);
            Stack stack(inputs_);
            call_below_autograd(op_, &stack, generator_);
            size_t next = 0;
            for (const auto& value : stack) each_result(value, [&](const at::Tensor& t) {
                if (results_[next].defined()) results_[next].copy_(t);
                next++;
            });
            return 0;
        } catch (const c10::Error& error) {
            npusim_set_error((name_ + " in a graph: " + error.what_without_backtrace()).c_str());
            return 507000;
        } catch (const std::exception& error) {
            npusim_set_error((name_ + " in a graph: " + error.what()).c_str());
            return 507000;
        }
    }
    void undo() {
        for (auto& [alias, value] : before_)
            if (alias.sizes() == value.sizes()) alias.copy_(value);
        for (const auto& result : results_)
            if (result.defined()) fill_with_poison(result);
    }
    template <class Visit>
    static void each_result(const IValue& v, Visit visit) {  // undefined ones too, as in Call::to_device
        if (v.isTensor()) visit(v.toTensor());
        if (v.isTensorList())
            for (at::Tensor t : v.toTensorList()) visit(t);
    }
    void check_is_live(const at::Tensor& t) const {
        if (t.numel() == 0 || t.storage().data_ptr().get_context() != nullptr) return;  // owned, so host memory
        int64_t last = 0;
        for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
        TORCH_CHECK(npusim_is_live(t.data_ptr(), (last + 1) * t.element_size()), "a tensor that the graph was captured with is gone: "
                    "its memory was given back to the device");
    }

    c10::OperatorHandle op_;
    std::string name_, types_;
    at::Generator generator_;
    Stack inputs_;
    std::vector<at::Tensor> results_;
    std::vector<std::pair<at::Tensor, at::Tensor>> before_;  // what the call writes to, and what was there
};

// ---- the kernel that stands for every aten kernel of the backend
bool is_in_place(const c10::OperatorHandle& op) {
    const auto& results = op.schema().returns();
    return !results.empty() && results[0].alias_info() && results[0].alias_info()->isWrite();
}
bool is_given(const c10::OperatorHandle& op, const Stack& stack, size_t first, const char* name) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++)
        if (arguments[i].name() == name) return !stack[first + i].isNone();
    return false;
}
// Whether the host goes on while a copy between it and the device is under way.
bool copies_without_waiting(const c10::OperatorHandle& op, const Stack& stack, size_t first, const Call& call) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++)
        if (arguments[i].name() == "non_blocking" && stack[first + i].isBool() && stack[first + i].toBool())
            return !call.cpu_tensors().empty() &&
                   std::all_of(call.cpu_tensors().begin(), call.cpu_tensors().end(),
                               [](const auto& t) { return t.numel() == 0 || t.is_pinned(); });
    return false;
}
// Whether a batched product is given a view that its kernel copies first: it reads matrices in either order, one right
// after another.
bool has_strided_operand(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
    const auto& name = op.schema().name();
    if (name != "aten::bmm" && name != "aten::baddbmm") return false;
    const size_t left = name == "aten::bmm" ? first : first + 1;
    return std::any_of(stack.begin() + left, stack.begin() + left + 2, [](const IValue& v) {
        return !v.toTensor().is_contiguous() && !v.toTensor().transpose(1, 2).is_contiguous();
    });
}
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    count(full_name(op));
    std::string types = types_of(*stack, op.schema().arguments().size());
    const std::string strided = has_strided_operand(op, *stack, stack->size() - op.schema().arguments().size()) ? " strided" : "";
    Call call(op.schema().name());
    const size_t first = stack->size() - op.schema().arguments().size();
    for (size_t i = first; i < stack->size(); i++) (*stack)[i] = call.to_cpu((*stack)[i]);
    call.check_devices();
    const bool has_output_size = is_given(op, *stack, first, "output_size");
    const bool is_asynchronous = call.crosses_devices() && copies_without_waiting(op, *stack, first, call);
    const bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
    const at::Generator generator = is_random ? call.generator() : at::Generator();

    std::unique_ptr<RecordedCall> recorded;
    check_order(op.schema().name());
    if (npusim_is_capturing()) {
        refuse_what_cannot_be_captured(op, call, *stack, first);
        recorded = std::make_unique<RecordedCall>(op, call, *stack, first, generator, types + strided);
    }
    call_below_autograd(op, stack, generator);
    call.follow_resizes();
    const size_t num_results = op.schema().returns().size();
    for (size_t i = stack->size() - num_results; i < stack->size(); i++) (*stack)[i] = call.to_device((*stack)[i]);
    if (!is_in_place(op)) types += "->" + types_of(*stack, num_results);
    if (is_asynchronous) types += " async";
    if (has_output_size) types += " sized";
    types += strided;
    count_typed(full_name(op), types);
    if (recorded) {
        recorded->set_results(call.new_results());
        npusim_record(recorded.release()->as_task());
    }
}

// ---- ops that keep torch_npu's kernel: counted, named in errors
class HostKernel : public c10::OperatorKernel {
  public:
    HostKernel(std::string name, c10::SafeKernelFunction original, bool is_allocation)
        : name_(std::move(name)), original_(std::move(original)), is_allocation_(is_allocation) {}

    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
        if (is_allocation_) {
            original_.callBoxed(op, keys, stack);
            if (poison_is_on()) fill_with_poison(stack->back().toTensor());
            return;
        }
        count(name_);
        std::string types = types_of(*stack, op.schema().arguments().size());
        const char* before = npusim_current_op(name_.c_str());
        try {
            original_.callBoxed(op, keys, stack);
            if (!is_in_place(op)) types += "->" + types_of(*stack, op.schema().returns().size());
            count_typed(name_, types);
        } catch (...) {
            npusim_current_op(before);
            throw;
        }
        npusim_current_op(before);
    }

  private:
    std::string name_;
    c10::SafeKernelFunction original_;
    bool is_allocation_;
};

const std::unordered_set<std::string> ALLOCATIONS = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"};
const std::unordered_set<std::string> KEPT = {
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::set_", "aten::resize_", "aten::alias",
    "aten::is_pinned", "aten::_pin_memory", "aten::pin_memory", "aten::record_stream", "aten::unfold", "aten::is_set_to",
    "aten::_has_compatible_shallow_copy_type", "aten::resize_as_", "aten::lift", "aten::lift_fresh", "aten::view_as_real",
    "aten::view_as_complex", "aten::_efficientzerotensor"};

std::vector<std::unique_ptr<torch::Library>>& libraries() {  // registrations live as long as the process
    static auto* all = new std::vector<std::unique_ptr<torch::Library>>;
    return *all;
}
torch::Library& library(const char* name_space) {
    libraries().push_back(std::make_unique<torch::Library>(torch::Library::IMPL, name_space, DispatchKey::PrivateUse1, __FILE__, __LINE__));
    return *libraries().back();
}

int64_t install() {
    at::addGlobalCallback(at::RecordFunctionCallback(&enter_phase, &leave_phase).scopes({at::RecordScope::USER_SCOPE}));
    auto& dispatcher = c10::Dispatcher::singleton();
    auto& aten = library("aten");
    auto& npu = library("npu");
    int64_t replaced = 0;
    for (const auto& name : dispatcher.getAllOpNames()) {
        const bool is_aten = name.name.rfind("aten::", 0) == 0, is_npu = name.name.rfind("npu::", 0) == 0;
        const auto op = dispatcher.findOp(name);
        if (!(is_aten || is_npu) || KEPT.count(name.name) || !op || !op->hasSchema() ||
            !op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
            continue;
        const auto full = full_name(*op);
        const auto within = full.substr(full.find("::") + 2);
        if (is_aten && !ALLOCATIONS.count(full) && op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
            aten.impl(within.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
            replaced++;
            continue;
        }
        auto kernel = std::make_unique<HostKernel>(full.substr(is_npu ? 5 : 0), op->getComputedKernelForDispatchKey(DispatchKey::PrivateUse1),
                                                   ALLOCATIONS.count(full) > 0);
        (is_aten ? aten : npu).impl(within.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
    }
    return replaced;
}

std::string report_calls() {
    std::lock_guard<std::mutex> lock(calls_mutex);
    std::string text;
    for (const auto& [name, times] : calls) text += name + " " + std::to_string(times) + "\n";
    return text;
}
void reset_calls() {
    std::lock_guard<std::mutex> lock(calls_mutex);
    calls.clear();
    std::lock_guard<std::mutex> typed_lock(typed().mutex);
    typed().calls.clear();
}
void count_call(std::string name) { count(name); }

}  // namespace

TORCH_LIBRARY(npusim, m) {
    m.def("as_cpu(Tensor(a) t) -> Tensor(a)");
    m.def("as_unowned_cpu(Tensor(a) t) -> Tensor(a)");
    m.def("poison(Tensor(a!) t) -> ()");
    m.def("install() -> int", &install);
    m.def("calls() -> str", &report_calls);
    m.def("typed_calls() -> str", &report_typed_calls);
    m.def("reset_calls() -> ()", &reset_calls);
    m.def("count_call(str name) -> ()", &count_call);
    m.def("check_order(str op) -> ()", &check_order);
}
TORCH_LIBRARY_IMPL(npusim, CompositeExplicitAutograd, m) {
    m.impl("as_cpu", [](const at::Tensor& t) { return on_npu(t) ? alias_on_cpu(t) : t; });
    m.impl("as_unowned_cpu", [](const at::Tensor& t) { return on_npu(t) ? unowned(alias_on_cpu(t)) : t; });
    m.impl("poison", [](const at::Tensor& t) { fill_with_poison(t); });
}
