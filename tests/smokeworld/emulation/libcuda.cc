// The driver API that buildkit/gdn/driver.py calls, with the host's memory as the device's. EMULATED_GPUS is the number
// of GPUs, EMULATED_LOAD the CUresult of loading a module (209: no binary for this GPU).
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

extern "C" {
int cuInit(unsigned) { return setting("EMULATED_GPUS", 1) ? 0 : 100; }
int cuDeviceGetCount(int *count) { return *count = setting("EMULATED_GPUS", 1), 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void **context, int) { return *context = malloc(1), 0; }
int cuCtxSetCurrent(void *) { return 0; }
int cuDeviceGetName(char *name, int size, int) { return snprintf(name, size, "Emulated GPU"), 0; }
int cuDriverGetVersion(int *version) { return *version = 12090, 0; }
int cuDeviceGetAttribute(int *value, int which, int) { return *value = which == 75 ? 7 : 0, 0; }
int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    return *pointer = reinterpret_cast<uint64_t>(malloc(size)), 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    return memcpy(reinterpret_cast<void *>(to), from, size), 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    return memcpy(to, reinterpret_cast<void *>(from), size), 0;
}
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t size) {
    return memset(reinterpret_cast<void *>(to), value, size), 0;
}
int cuCtxSynchronize() { return setting("EMULATED_SYNC", 0); }
int cuModuleLoadData(void **module, const void *) { return *module = malloc(1), setting("EMULATED_LOAD", 0); }
int cuModuleUnload(void *) { return 0; }
int cuGetErrorName(int code, const char **text) {
    *text = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_EMULATED";
    return 0;
}
}
