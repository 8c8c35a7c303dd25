// The old operator path (aclop*), profiling and kernel-binary calls of the fake libascendcl.so. Descriptors are kept so
// that torch_npu's host code can read them back; running an operator is refused by name.
#include <chrono>
#include <cstdlib>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "simulator.h"

namespace {
struct TensorDesc {
    aclDataType dtype;
    aclFormat format;
    std::vector<int64_t> shape;
};
TensorDesc* as_desc(const aclTensorDesc* desc) {
    return reinterpret_cast<TensorDesc*>(const_cast<aclTensorDesc*>(desc));
}
}  // namespace

extern "C" {

aclError aclopCompileAndExecute(const char* op, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
    return npusim::fail(500002, "the operator '%s' goes through the old aclop path, which is not simulated: add a kernel "
                        "of the torch op that called it to tests/npu/npusim/references", op);
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
aclDataBuffer* aclCreateDataBuffer(void*, size_t) { return reinterpret_cast<aclDataBuffer*>(new char); }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
    delete reinterpret_cast<const char*>(buffer);
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
