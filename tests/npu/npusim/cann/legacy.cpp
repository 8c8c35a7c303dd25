// The old operator path (aclop*), profiling and kernel-binary calls of the fake libascendcl.so. Descriptors are kept so
// that torch_npu's host code can read them back. One operator is done: "Identity", by which npu_format_cast changes a
// private format. Here the bytes keep their plain order under any format. The others are refused by name.
#include <chrono>
#include <algorithm>
#include <cstring>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "simulator.h"

namespace {
struct TensorDesc {
    aclDataType dtype;
    aclFormat format;
    std::vector<int64_t> shape;
};
struct DataBuffer {
    void* data;
    size_t bytes;
};
TensorDesc* as_desc(const aclTensorDesc* desc) {
    return reinterpret_cast<TensorDesc*>(const_cast<aclTensorDesc*>(desc));
}
}  // namespace

extern "C" {

aclError aclopCompileAndExecute(const char* op, int num_inputs, const aclTensorDesc* const[], const aclDataBuffer* const inputs[],
                                int num_outputs, const aclTensorDesc* const[], aclDataBuffer* const outputs[], const aclopAttr*,
                                aclopEngineType, aclopCompileType, const char*, aclrtStream) {
    if (strcmp(op, "Identity") == 0 && num_inputs >= 1 && num_outputs == 1) {
        if (npusim::capturing()) return npusim::fail(107030, "a format cast inside a capture is not simulated");
        const auto* from = reinterpret_cast<const DataBuffer*>(inputs[0]);
        const auto* to = reinterpret_cast<const DataBuffer*>(outputs[0]);
        memmove(to->data, from->data, std::min(from->bytes, to->bytes));
        return ACL_SUCCESS;
    }
    return npusim::fail(500002, "the operator '%s' goes through the old aclop path, which is not simulated: use the op that "
                        "replaced it, or teach tests/npu/npusim/cann/legacy.cpp this one", op);
}
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }

aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int num_dims, const int64_t* dims, aclFormat format) {
    return reinterpret_cast<aclTensorDesc*>(new TensorDesc{dtype, format, {dims, dims + num_dims}});
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete as_desc(desc); }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return as_desc(desc)->dtype; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return as_desc(desc)->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return as_desc(desc)->shape.size(); }
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
    *size = as_desc(desc)->shape.at(index);
    return ACL_SUCCESS;
}
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) {
    return reinterpret_cast<aclDataBuffer*>(new DataBuffer{data, bytes});
}
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
    delete reinterpret_cast<const DataBuffer*>(buffer);
    return ACL_SUCCESS;
}
aclopAttr* aclopCreateAttr() { return reinterpret_cast<aclopAttr*>(new char); }
void aclopDestroyAttr(const aclopAttr* attributes) { delete reinterpret_cast<const char*>(attributes); }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }

// ---- dumps, logs and profiling: accepted and ignored
aclError aclmdlInitDump() { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char*) { return ACL_SUCCESS; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
long MsprofGetHashId() { return 0; }
long MsprofRegisterCallback() { return 0; }
long MsprofReportAdditionalInfo() { return 0; }
long MsprofReportApi() { return 0; }
long MsprofReportCompactInfo() { return 0; }
unsigned long MsprofSysCycleTime() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// ---- kernels that torch_npu registers when it is loaded: they are never launched
long rtDevBinaryRegister() { return 0; }
long rtFunctionRegister() { return 0; }
long rtGetC2cCtrlAddr() { return 0; }
long rtKernelLaunch() { return npusim::fail(500002, "launching a kernel binary is not simulated"); }
aclError aclrtBinaryLoadFromData(const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*) { return ACL_SUCCESS; }
aclError aclrtBinaryGetFunction(const aclrtBinHandle, const char*, aclrtFuncHandle*) { return ACL_SUCCESS; }
aclError aclrtGetFunctionAddr(aclrtFuncHandle, void**, void**) { return ACL_SUCCESS; }

}  // extern "C"
