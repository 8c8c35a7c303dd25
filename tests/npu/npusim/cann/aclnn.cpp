// The hand-written part of the fake libopapi.so: argument objects, the strictness switch, and the two operators that
// torch_npu's own host code calls directly. build.py generates one refusing entry point for every other aclnn name.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "simulator.h"

namespace {

// While a reference runs torch_npu's host code for its checks and shapes, kernels may be asked for: they do nothing.
thread_local int host_only_depth = 0;

struct Argument {
    int64_t num_dims = 0;
    int dtype = 0;
    int64_t offset = 0;
    char* data = nullptr;
    std::vector<int64_t> shape, strides;
};

size_t element_size(int dtype) {
    switch (dtype) {
        case ACL_INT8: case ACL_UINT8: case ACL_BOOL: return 1;
        case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
        case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
        default: return 8;
    }
}

void copy_into(const Argument& from, Argument& to, const std::vector<int64_t>& corner) {
    const size_t bytes = element_size(from.dtype);
    int64_t count = 1;
    for (int64_t size : from.shape) count *= size;
    std::vector<int64_t> index(from.num_dims, 0);
    for (int64_t element = 0; element < count; element++) {
        int64_t source = from.offset, target = to.offset;
        for (int64_t d = 0; d < from.num_dims; d++) {
            source += index[d] * from.strides[d];
            target += (index[d] + corner[d]) * to.strides[d];
        }
        memcpy(to.data + target * bytes, from.data + source * bytes, bytes);
        for (int64_t d = from.num_dims - 1; d >= 0 && ++index[d] == from.shape[d]; d--) index[d] = 0;
    }
}

Argument* make_list(const int64_t* values, uint64_t count) {
    auto* list = new Argument;
    list->num_dims = static_cast<int64_t>(count);
    if (values) list->shape.assign(values, values + count);
    return list;
}

long drop(const void* argument) {
    delete static_cast<const Argument*>(argument);
    return 0;
}

}  // namespace

extern "C" {

void npusim_host_only(int enter) { host_only_depth += enter ? 1 : -1; }

// What every generated entry point does.
long npusim_aclnn(const char* name) {
    if (host_only_depth > 0) return 0;
    const char* op = npusim_current_op(nullptr);
    npusim_current_op(op);
    const std::string text = std::string(op ? op : "an op") + " asks for the kernel " + name +
                             ", which the simulator does not have: add @reference(\"" + (op ? op : "<name of the op>") +
                             "\") to a file of tests/npu/npusim/references/";
    npusim_set_error(text.c_str());
    return 561103;
}

void* aclCreateTensor(const int64_t* shape, uint64_t num_dims, int dtype, const int64_t* strides, int64_t offset, int,
                      const int64_t*, uint64_t, void* data) {
    auto* tensor = new Argument;
    tensor->num_dims = static_cast<int64_t>(num_dims);
    tensor->dtype = dtype;
    tensor->offset = offset;
    tensor->data = static_cast<char*>(data);
    tensor->shape.assign(shape, shape + num_dims);
    if (strides) tensor->strides.assign(strides, strides + num_dims);
    return tensor;
}
void* aclCreateScalar(void*, int) { return new Argument; }
void* aclCreateIntArray(const int64_t* values, uint64_t count) { return make_list(values, count); }
void* aclCreateBoolArray(const void*, uint64_t count) { return make_list(nullptr, count); }
void* aclCreateFloatArray(const void*, uint64_t count) { return make_list(nullptr, count); }
void* aclCreateTensorList(void* const*, uint64_t count) { return make_list(nullptr, count); }
void* aclCreateScalarList(void* const*, uint64_t count) { return make_list(nullptr, count); }
long aclDestroyTensor(const void* a) { return drop(a); }
long aclDestroyScalar(const void* a) { return drop(a); }
long aclDestroyIntArray(const void* a) { return drop(a); }
long aclDestroyBoolArray(const void* a) { return drop(a); }
long aclDestroyFloatArray(const void* a) { return drop(a); }
long aclDestroyTensorList(const void* a) { return drop(a); }
long aclDestroyScalarList(const void* a) { return drop(a); }
long aclDestroyAclOpExecutor(void*) { return 0; }
long aclGetViewShape(const void* tensor, int64_t** shape, uint64_t* num_dims) {
    const auto* argument = static_cast<const Argument*>(tensor);
    *num_dims = argument->shape.size();
    *shape = static_cast<int64_t*>(malloc(sizeof(int64_t) * (*num_dims + 1)));
    memcpy(*shape, argument->shape.data(), sizeof(int64_t) * *num_dims);
    return 0;
}
long InitHugeMemThreadLocal(void*, bool) { return 0; }
void UnInitHugeMemThreadLocal(void*, bool) {}
void ReleaseHugeMem(void*, bool) {}

// Padding with zeros on any side; the work is done when the workspace is asked for, the launch itself is empty.
long aclnnConstantPadNdGetWorkspaceSize(Argument* from, Argument* pad, void*, Argument* to, uint64_t* workspace, void**) {
    int64_t count = 1;
    for (int64_t size : to->shape) count *= size;
    memset(to->data + to->offset * element_size(to->dtype), 0, count * element_size(to->dtype));
    std::vector<int64_t> corner(from->num_dims, 0);
    for (int64_t pair = 0; pair < pad->num_dims / 2; pair++) corner[from->num_dims - 1 - pair] = pad->shape[2 * pair];
    copy_into(*from, *to, corner);
    *workspace = 0;
    return 0;
}
long aclnnConstantPadNd() { return 0; }

long aclnnInplaceCopyGetWorkspaceSize(Argument* to, Argument* from, uint64_t* workspace, void**) {
    *workspace = 0;
    if (to->dtype != from->dtype || to->shape != from->shape) return npusim_aclnn("aclnnInplaceCopy (converting)");
    copy_into(*from, *to, std::vector<int64_t>(from->num_dims, 0));
    return 0;
}
long aclnnInplaceCopy() { return 0; }

}  // extern "C"
