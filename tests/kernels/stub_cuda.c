/* Stub of the CUDA driver: one device of compute capability 9.0 without memory. It runs nothing and records every
 * launch as a line of text: kernel, grid, block, shared memory, stream, attributes and the bytes of every parameter.
 *
 * A module is PTX text instead of a cubin: as a cubin does, it states the sizes of the parameters of its kernel. A
 * first line `//` with hexadecimal digits is an identifier, which records repeat.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define MOST_PARAMETERS 512

typedef struct {
  char name[256], image[32];
  int count, bytes[MOST_PARAMETERS];
} Kernel;

static char *record_text = NULL;
static size_t record_size = 0, record_room = 0;
static int is_recording = 1;
static long launches = 0;
static CUcontext current = NULL;

/* For the test. */
const char *stub_records(void) { return record_text ? record_text : ""; }
void stub_clear(void) { record_size = 0, launches = 0; if (record_text) record_text[0] = 0; }
void stub_record(int on) { is_recording = on; }
long stub_launches(void) { return launches; }

static void append(const char *text, size_t size) {
  if (record_size + size + 1 > record_room) {
    record_room = 2 * (record_size + size + 1);
    record_text = realloc(record_text, record_room);
  }
  memcpy(record_text + record_size, text, size);
  record_size += size;
  record_text[record_size] = 0;
}

static void append_bytes(const void *bytes, int size) {
  static const char digits[] = "0123456789abcdef";
  for (int i = 0; i < size; i++) {
    unsigned char byte = ((const unsigned char *)bytes)[i];
    char two[2] = {digits[byte >> 4], digits[byte & 15]};
    append(two, 2);
  }
}

static int size_of(const char *parameter, const char *end) {
  const char *array = memchr(parameter, '[', end - parameter);
  if (array) return atoi(array + 1);
  for (const char *at = parameter; at < end; at++)
    if (*at == '.' && memchr("busf", at[1], 4) && at[2] >= '0' && at[2] <= '9') return atoi(at + 2) / 8;
  return 0;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  Kernel *kernel = calloc(1, sizeof(Kernel));
  const char *text = strstr(image, ".entry");
  if (!text) return CUDA_ERROR_INVALID_IMAGE;
  const char *open = strchr(text, '('), *close = strchr(text, ')');
  sscanf(text + 6, " %255[^( \n]", kernel->name);
  sscanf(image, "//%31[0-9a-f]", kernel->image);
  for (const char *at = strstr(open, ".param"); at && at < close;) {
    const char *next = strstr(at + 6, ".param"), *end = next && next < close ? next : close;
    kernel->bytes[kernel->count++] = size_of(at + 6, end);
    at = next;
  }
  *module = (CUmodule)kernel;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return strcmp(((Kernel *)module)->name, name) ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

/* A kernel that is launched afterwards has no name: the test fails where a module is used after it is unloaded. */
CUresult cuModuleUnload(CUmodule module) { memset(module, 0, sizeof(Kernel)); return CUDA_SUCCESS; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  launches++;
  if (!is_recording) return CUDA_SUCCESS;
  const Kernel *kernel = (const Kernel *)function;
  char head[512];
  int size = snprintf(head, sizeof head, "%s image=%s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%llu attributes=",
                      kernel->name, kernel->image, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                      config->blockDimY, config->blockDimZ, config->sharedMemBytes,
                      (unsigned long long)config->hStream);
  append(head, size);
  for (unsigned i = 0; i < config->numAttrs; i++) {
    const CUlaunchAttribute *one = config->attrs + i;
    size = snprintf(head, sizeof head, "%d:", (int)one->id);
    append(head, size);
    append_bytes(&one->value, one->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION ? 12 : 4);
    append(";", 1);
  }
  append(" parameters=", 12);
  for (int i = 0; i < kernel->count; i++) {
    if (i) append(",", 1);
    append_bytes(parameters[i], kernel->bytes[i]);
  }
  append("\n", 1);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned char *at = memset(map, 0, sizeof *map);
  const unsigned char options[] = {type, rank, interleave, swizzle, promotion, fill};
  memcpy(at, &address, 8);
  memcpy(at + 8, sizes, 8 * rank);
  memcpy(at + 48, strides, 8 * (rank - 1));
  memcpy(at + 80, box, 4 * rank);
  memcpy(at + 100, options, sizeof options);
  for (unsigned i = 0; i < rank; i++) at[106 + i] = steps[i];
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
  default: *value = 65536;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  memcpy(value, &pointer, sizeof pointer);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "error of the stub"; return CUDA_SUCCESS; }
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13020; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }
