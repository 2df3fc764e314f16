/*
 * The part of the CUDA driver's binary interface that driver.c uses, under our own names, so that the
 * library can be built without NVIDIA's cuda.h. Handles are pointers; enumerations are ints.
 */
#ifndef FA_CUDA_ABI_H
#define FA_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result; /* 0: fine */
typedef int cu_device;
typedef unsigned long long cu_address; /* of device memory */
typedef struct cu_context_handle *cu_context;
typedef struct cu_library_handle *cu_library;
typedef struct cu_kernel_handle *cu_kernel;
typedef struct cu_event_handle *cu_event;
typedef struct cu_graph_handle *cu_graph;
typedef struct cu_user_object_handle *cu_user_object;

enum {
    CU_SUCCESS = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_NO_DEVICE = 100,
    CU_INVALID_DEVICE = 101,
    CU_INVALID_CONTEXT = 201
};

enum { /* cuDeviceGetAttribute */
       CU_DEVICE_MULTIPROCESSORS = 16,
       CU_DEVICE_L2_BYTES = 38,
       CU_DEVICE_MAJOR = 75,
       CU_DEVICE_MINOR = 76,
       CU_DEVICE_SMEM_PER_SM = 81,
       CU_DEVICE_REGISTERS_PER_SM = 82,
       CU_DEVICE_SMEM_PER_BLOCK = 97 /* with opting in */
};

enum { /* cuPointerGetAttributes */
       CU_POINTER_MEMORY_TYPE = 2,
       CU_POINTER_IS_MANAGED = 8,
       CU_POINTER_DEVICE_ORDINAL = 9,
       CU_POINTER_RANGE_START = 11,
       CU_POINTER_RANGE_SIZE = 12,
       CU_MEMORY_DEVICE = 2
};

enum { /* cuKernelGetAttribute, cuKernelSetAttribute */
       CU_KERNEL_STATIC_SMEM = 1,
       CU_KERNEL_LOCAL_BYTES = 3,
       CU_KERNEL_REGISTERS = 4,
       CU_KERNEL_MAX_DYNAMIC_SMEM = 8
};

enum { CU_LAUNCH_CLUSTER = 4, CU_LAUNCH_OVERLAPS = 6 /* programmatic stream serialization */ };
enum { CU_CAPTURE_RELAXED = 2 };
enum { CU_NOT_CAPTURING = 0 };
enum { CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1, CU_GRAPH_USER_OBJECT_MOVE = 1 };
enum { CU_HOST_PORTABLE = 1, CU_HOST_MAPPED = 2 };
enum { CU_STREAM_NON_BLOCKING = 1 }; /* does not wait for the default stream */

enum { /* cuTensorMapEncodeTiled */
       CU_MAP_UINT8 = 0,
       CU_MAP_FLOAT16 = 6,
       CU_MAP_FLOAT32 = 7,
       CU_MAP_BFLOAT16 = 9,
       CU_MAP_TF32 = 11,
       CU_MAP_NO_INTERLEAVE = 0,
       CU_MAP_SWIZZLE_128B = 3,
       CU_MAP_L2_128B = 2,
       CU_MAP_FILL_ZERO = 0
};

typedef struct cu_launch_attribute {
    int id;
    char padding[4];
    union {
        unsigned cluster[3];
        int overlaps;
        char bytes[64];
        void *alignment;
    } value;
} cu_launch_attribute;

typedef struct cu_launch_config {
    unsigned grid[3], block[3];
    unsigned smem_bytes;
    void *stream;
    cu_launch_attribute *attributes;
    unsigned num_attributes;
} cu_launch_config;

_Static_assert(sizeof(cu_launch_attribute) == 72, "CUlaunchAttribute");
_Static_assert(offsetof(cu_launch_config, stream) == 32, "CUlaunchConfig");

/* F(function, symbol in the driver, parameters). A function whose signature has changed has a new symbol
 * with a version. These are the symbols of CUDA 12.0, which later drivers keep. */
#define CU_FUNCTIONS(F)                                                                            \
    F(cuInit, "cuInit", (unsigned flags))                                                          \
    F(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                          \
    F(cuDeviceGetName, "cuDeviceGetName", (char *name, int size, cu_device device))                \
    F(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, cu_device device)) \
    F(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t * bytes, cu_device device))                 \
    F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                                        \
      (cu_context * context, cu_device device))                                                    \
    F(cuCtxSetCurrent, "cuCtxSetCurrent", (cu_context context))                                    \
    F(cuCtxGetDevice, "cuCtxGetDevice", (cu_device * device))                                      \
    F(cuCtxGetId, "cuCtxGetId", (cu_context context, unsigned long long *id))                      \
    F(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                \
    F(cuPointerGetAttributes, "cuPointerGetAttributes",                                            \
      (unsigned count, int *attributes, void **values, cu_address pointer))                        \
    F(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *mode))         \
    F(cuLibraryLoadData, "cuLibraryLoadData",                                                      \
      (cu_library * library, const void *code, int *jit_options, void **jit_values,                \
       unsigned num_jit, int *options, void **values, unsigned num_options))                       \
    F(cuStreamIsCapturing, "cuStreamIsCapturing", (void *stream, int *status))                     \
    F(cuStreamGetId, "cuStreamGetId", (void *stream, unsigned long long *id))                      \
    F(cuStreamGetCtx, "cuStreamGetCtx", (void *stream, cu_context *context))                       \
    F(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2",                                         \
      (void *stream, int *status, unsigned long long *id, cu_graph *graph, const void **nodes,     \
       size_t *num_nodes))                                                                         \
    F(cuUserObjectCreate, "cuUserObjectCreate",                                                    \
      (cu_user_object * object, void *data, void (*destroy)(void *), unsigned count,               \
       unsigned flags))                                                                            \
    F(cuUserObjectRelease, "cuUserObjectRelease", (cu_user_object object, unsigned count))         \
    F(cuGraphRetainUserObject, "cuGraphRetainUserObject",                                          \
      (cu_graph graph, cu_user_object object, unsigned count, unsigned flags))                     \
    F(cuLibraryGetKernel, "cuLibraryGetKernel",                                                    \
      (cu_kernel * kernel, cu_library library, const char *name))                                  \
    F(cuLibraryGetGlobal, "cuLibraryGetGlobal",                                                    \
      (cu_address * address, size_t * bytes, cu_library library, const char *name))                \
    F(cuKernelGetAttribute, "cuKernelGetAttribute",                                                \
      (int *value, int attribute, cu_kernel kernel, cu_device device))                             \
    F(cuKernelSetAttribute, "cuKernelSetAttribute",                                                \
      (int attribute, int value, cu_kernel kernel, cu_device device))                              \
    F(cuLaunchKernelEx, "cuLaunchKernelEx",                                                        \
      (const cu_launch_config *config, cu_kernel kernel, void **parameters, void **extra))         \
    F(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                            \
      (void *map, int type, uint32_t axes, void *base, const uint64_t *extents,                    \
       const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,        \
       int swizzle, int promotion, int fill))                                                      \
    F(cuMemAlloc, "cuMemAlloc_v2", (cu_address * pointer, size_t bytes))                           \
    F(cuMemFree, "cuMemFree_v2", (cu_address pointer))                                             \
    F(cuMemHostAlloc, "cuMemHostAlloc", (void **pointer, size_t bytes, unsigned flags))            \
    F(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (cu_address to, const void *from, size_t bytes))            \
    F(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *to, cu_address from, size_t bytes))                  \
    F(cuMemsetD8, "cuMemsetD8_v2", (cu_address to, unsigned char byte, size_t bytes))              \
    F(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                                   \
      (cu_address to, const void *from, size_t bytes, void *stream))                               \
    F(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                                   \
      (void *to, cu_address from, size_t bytes, void *stream))                                     \
    F(cuStreamCreate, "cuStreamCreate", (void **stream, unsigned flags))                           \
    F(cuStreamDestroy, "cuStreamDestroy_v2", (void *stream))                                       \
    F(cuStreamSynchronize, "cuStreamSynchronize", (void *stream))                                  \
    F(cuMemGetInfo, "cuMemGetInfo_v2", (size_t * left, size_t * total))                            \
    F(cuEventCreate, "cuEventCreate", (cu_event * event, unsigned flags))                          \
    F(cuEventDestroy, "cuEventDestroy_v2", (cu_event event))                                       \
    F(cuEventRecord, "cuEventRecord", (cu_event event, void *stream))                              \
    F(cuEventQuery, "cuEventQuery", (cu_event event))                                              \
    F(cuEventSynchronize, "cuEventSynchronize", (cu_event event))                                  \
    F(cuEventElapsedTime, "cuEventElapsedTime", (float *milliseconds, cu_event begin, cu_event end))

/* Every driver has these, even if it is too old for the others. */
#define CU_OLD_FUNCTIONS(F)                                                                        \
    F(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                    \
    F(cuGetErrorName, "cuGetErrorName", (cu_result code, const char **name))                       \
    F(cuGetErrorString, "cuGetErrorString", (cu_result code, const char **text))

#define CU_MEMBER(function, symbol, parameters) cu_result(*function) parameters;
typedef struct cu_api {
    CU_OLD_FUNCTIONS(CU_MEMBER)
    CU_FUNCTIONS(CU_MEMBER)
} cu_api;
#undef CU_MEMBER

#endif
