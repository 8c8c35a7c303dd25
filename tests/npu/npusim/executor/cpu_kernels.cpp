// Gives torch_npu's "device" its arithmetic: every aten kernel of the npu backend is replaced by the CPU kernel of the
// same op, run on CPU tensors that share the fake device's memory. Allocation and views stay torch_npu's own.
#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
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
void count(const std::string& name) {
    std::lock_guard<std::mutex> lock(calls_mutex);
    calls[name]++;
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
        if (v.isGenerator()) return IValue();
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

    const std::vector<std::pair<at::Tensor, at::Tensor>>& aliases() const { return aliases_; }
    const std::vector<std::pair<at::Tensor, at::Tensor>>& fresh() const { return fresh_; }

  private:
    at::Tensor alias(const at::Tensor& t) {
        if (!on_npu(t)) {
            if (t.defined() && t.device().is_cpu() && t.dim() > 0) has_cpu_tensor_ = true;
            return t;
        }
        for (const auto& [device_tensor, alias] : aliases_)
            if (device_tensor.is_same(t)) return alias;
        device_ = t.device();
        aliases_.emplace_back(t, alias_on_cpu(t));
        return aliases_.back().second;
    }

    at::Tensor result(const at::Tensor& r) {
        if (!r.defined()) return r;
        for (const auto& [device_tensor, alias] : aliases_)
            if (alias.is_same(r)) return device_tensor;
        if (!r.device().is_cpu() || result_on_cpu_) return r;
        for (const auto& [device_tensor, alias] : aliases_)  // a view of an argument
            if (r.storage().unsafeGetStorageImpl() == alias.storage().unsafeGetStorageImpl())
                return device_tensor.as_strided(r.sizes(), r.strides(), r.storage_offset());
        auto made = at::empty_strided(r.sizes(), r.strides(), r.options().device(device_).pinned_memory(false));
        if (r.numel()) alias_on_cpu(made).copy_(r);
        fresh_.emplace_back(made, r);
        return made;
    }

    std::string op_;
    bool may_mix_;
    c10::Device device_{NPU, -1};
    bool result_on_cpu_ = false, has_cpu_tensor_ = false;
    std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // device tensor, its alias
    std::vector<std::pair<at::Tensor, at::Tensor>> fresh_;    // new device tensor, the CPU result it was copied from
};

// ---- the kernel that stands for every aten kernel of the backend
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const auto name = full_name(op);
    count(name);
    Call call(op.schema().name());
    const size_t num_arguments = op.schema().arguments().size();
    const size_t first = stack->size() - num_arguments;
    for (size_t i = first; i < stack->size(); i++) (*stack)[i] = call.to_cpu((*stack)[i]);
    call.check_devices();
    {
        at::AutoDispatchBelowAutograd below;
        op.callBoxed(*stack);
    }
    call.follow_resizes();
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
        (*stack)[i] = call.to_device((*stack)[i]);
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
        const char* before = npusim_current_op(name_.c_str());
        try {
            original_.callBoxed(op, keys, stack);
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

const std::unordered_set<std::string> ALLOCATIONS = {"aten::empty", "aten::empty_strided"};
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
        if (is_aten && !ALLOCATIONS.count(name.name) && op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
            aten.impl(within.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
            replaced++;
            continue;
        }
        auto kernel = std::make_unique<HostKernel>(full.substr(is_npu ? 5 : 0), op->getComputedKernelForDispatchKey(DispatchKey::PrivateUse1),
                                                   ALLOCATIONS.count(name.name) > 0);
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
}
void count_call(std::string name) { count(name); }

}  // namespace

TORCH_LIBRARY(npusim, m) {
    m.def("as_cpu(Tensor(a) t) -> Tensor(a)");
    m.def("install() -> int", &install);
    m.def("calls() -> str", &report_calls);
    m.def("reset_calls() -> ()", &reset_calls);
    m.def("count_call(str name) -> ()", &count_call);
}
TORCH_LIBRARY_IMPL(npusim, CompositeExplicitAutograd, m) {
    m.impl("as_cpu", [](const at::Tensor& t) { return on_npu(t) ? alias_on_cpu(t) : t; });
}
