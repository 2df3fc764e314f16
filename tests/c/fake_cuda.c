/*
 * A CUDA driver without a GPU, for test_driver.c: it has the functions that src/cuda/driver.c
 * needs, pretends to have one H200, keeps "device" memory on the host, checks its arguments, and
 * records the calls. It is controlled by the environment:
 *   FAKE_CUDA_VERSION  the result of cuDriverGetVersion (13000)
 *   FAKE_CUDA_DEVICES  the number of devices (1)
 *   FAKE_CUDA_FAIL     FUNCTION=CODE: this function fails with this code
 * Compiled with FAKE_CUDA_OLD=1 it does not have what CUDA 12 introduced.
 */
#include "fake_cuda.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda_abi.h"

#define FAKE __attribute__((visibility("default")))

enum {
    NOT_INITIALIZED = 3,
    INVALID_VALUE = 1,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900
};

static atomic_int initialized;
static _Thread_local int current = -1, capture_mode;
FAKE fake_cuda_record fake_cuda = {0};

/* ---- control --------------------------------------------------------------------------------- */

/* The code with which FAKE_CUDA_FAIL makes a function fail; 0: it does not fail. */
static cu_result asked_to_fail(const char *function)
{
    const char *text = getenv("FAKE_CUDA_FAIL");
    size_t length = strlen(function);
    if (!text || strncmp(text, function, length) != 0 || text[length] != '=') return 0;
    return atoi(text + length + 1);
}

static int number_from(const char *variable, int otherwise)
{
    const char *text = getenv(variable);
    return text ? atoi(text) : otherwise;
}

/* The beginning of every function. */
#define BEGIN()                                                                                    \
    do {                                                                                           \
        cu_result code = asked_to_fail(__func__);                                                  \
        if (code) return code;                                                                     \
        if (!initialized) return NOT_INITIALIZED;                                                  \
    } while (0)

#define NEED_CONTEXT()                                                                             \
    do {                                                                                           \
        if (current < 0) return CU_INVALID_CONTEXT;                                                \
    } while (0)

/* ---- the driver and its devices -------------------------------------------------------------- */

FAKE cu_result cuDriverGetVersion(int *version)
{
    *version = number_from("FAKE_CUDA_VERSION", 13000);
    return asked_to_fail(__func__);
}

FAKE cu_result cuGetErrorName(cu_result code, const char **name)
{
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : NULL;
    return *name ? 0 : INVALID_VALUE;
}

FAKE cu_result cuGetErrorString(cu_result code, const char **text)
{
    *text = code == 2 ? "out of memory" : code == 100 ? "no CUDA-capable device is detected" : NULL;
    return *text ? 0 : INVALID_VALUE;
}

FAKE cu_result cuInit(unsigned flags)
{
    cu_result code = asked_to_fail(__func__);
    atomic_fetch_add(&fake_cuda.inits, 1);
    if (code) return code;
    initialized = 1;
    return flags ? INVALID_VALUE : 0;
}

FAKE cu_result cuDeviceGetCount(int *count)
{
    BEGIN();
    *count = number_from("FAKE_CUDA_DEVICES", 1);
    return 0;
}

FAKE cu_result cuDeviceGetName(char *name, int size, cu_device device)
{
    BEGIN();
    snprintf(name, (size_t)size, "NVIDIA H200 (fake %d)", device);
    return 0;
}

FAKE cu_result cuDeviceGetAttribute(int *value, int attribute, cu_device device)
{
    BEGIN();
    (void)device;
    atomic_fetch_add(&fake_cuda.attributes_read, 1);
    switch (attribute) {
    case CU_DEVICE_MAJOR: *value = 9; return 0;
    case CU_DEVICE_MINOR: *value = 0; return 0;
    case CU_DEVICE_MULTIPROCESSORS: *value = 132; return 0;
    case CU_DEVICE_SMEM_PER_BLOCK: *value = 232448; return 0;
    case CU_DEVICE_SMEM_PER_SM: *value = 233472; return 0;
    case CU_DEVICE_REGISTERS_PER_SM: *value = 65536; return 0;
    case CU_DEVICE_L2_BYTES: *value = 62914560; return 0;
    default: return INVALID_VALUE;
    }
}

FAKE cu_result cuDeviceTotalMem_v2(size_t *bytes, cu_device device)
{
    BEGIN();
    (void)device;
    *bytes = (size_t)141 << 30;
    return 0;
}

/* A context is its device's number plus one. */
FAKE cu_result cuDevicePrimaryCtxRetain(cu_context *context, cu_device device)
{
    BEGIN();
    if (device < 0 || device >= number_from("FAKE_CUDA_DEVICES", 1)) return CU_INVALID_DEVICE;
    *context = (cu_context)(uintptr_t)(device + 1);
    return 0;
}

FAKE cu_result cuCtxSetCurrent(cu_context context)
{
    BEGIN();
    current = (int)(uintptr_t)context - 1;
    return 0;
}

FAKE cu_result cuCtxGetDevice(cu_device *device)
{
    BEGIN();
    NEED_CONTEXT();
    atomic_fetch_add(&fake_cuda.contexts_asked, 1);
    *device = current;
    return 0;
}

FAKE cu_result cuCtxSynchronize(void)
{
    BEGIN();
    NEED_CONTEXT();
    atomic_fetch_add(&fake_cuda.synchronizations, 1);
    return 0;
}

/* ---- memory ---------------------------------------------------------------------------------- */

enum { ALLOCATIONS = 64 };
static struct {
    void *memory;
    size_t bytes;
    int device;
} allocations[ALLOCATIONS];

static int allocation_of(cu_address address)
{
    for (int i = 0; i < ALLOCATIONS; i++) {
        uintptr_t first = (uintptr_t)allocations[i].memory;
        if (first && address >= first && address < first + allocations[i].bytes) return i;
    }
    return -1;
}

FAKE cu_result cuMemAlloc_v2(cu_address *pointer, size_t bytes)
{
    BEGIN();
    NEED_CONTEXT();
    atomic_fetch_add(&fake_cuda.allocations, 1);
    for (int i = 0; i < ALLOCATIONS; i++) {
        if (allocations[i].memory) continue;
        allocations[i].memory = malloc(bytes);
        allocations[i].bytes = bytes;
        allocations[i].device = current;
        *pointer = (cu_address)(uintptr_t)allocations[i].memory;
        return allocations[i].memory ? 0 : CU_OUT_OF_MEMORY;
    }
    return CU_OUT_OF_MEMORY;
}

FAKE cu_result cuMemFree_v2(cu_address pointer)
{
    BEGIN();
    int i = allocation_of(pointer);
    if (i < 0) return INVALID_VALUE;
    free(allocations[i].memory);
    allocations[i].memory = NULL;
    return 0;
}

FAKE cu_result cuMemcpyHtoD_v2(cu_address to, const void *from, size_t bytes)
{
    BEGIN();
    NEED_CONTEXT();
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

FAKE cu_result cuMemcpyDtoH_v2(void *to, cu_address from, size_t bytes)
{
    BEGIN();
    NEED_CONTEXT();
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return 0;
}

FAKE cu_result cuMemsetD8_v2(cu_address to, unsigned char byte, size_t bytes)
{
    BEGIN();
    NEED_CONTEXT();
    memset((void *)(uintptr_t)to, byte, bytes);
    return 0;
}

/* Streams are numbers. Everything is done immediately. */
FAKE cu_result cuStreamCreate(void **stream, unsigned flags)
{
    static atomic_int count;
    BEGIN();
    NEED_CONTEXT();
    if (flags != CU_STREAM_NON_BLOCKING) return INVALID_VALUE;
    *stream = (void *)(uintptr_t)(4096 + atomic_fetch_add(&count, 1));
    atomic_fetch_add(&fake_cuda.streams, 1);
    return 0;
}

FAKE cu_result cuStreamDestroy_v2(void *stream)
{
    BEGIN();
    atomic_fetch_sub(&fake_cuda.streams, 1);
    return stream ? 0 : INVALID_VALUE;
}

FAKE cu_result cuStreamSynchronize(void *stream)
{
    BEGIN();
    (void)stream;
    NEED_CONTEXT();
    if (fake_cuda.capturing) return CAPTURE_UNSUPPORTED;
    atomic_fetch_add(&fake_cuda.waits, 1);
    return 0;
}

FAKE cu_result cuCtxGetId(cu_context context, unsigned long long *id)
{
    BEGIN();
    NEED_CONTEXT();
    *id = 100u + (unsigned)(context ? (int)(uintptr_t)context - 1 : current);
    return 0;
}

/* Not freed before the process ends, as in the library. */
FAKE cu_result cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    BEGIN();
    NEED_CONTEXT();
    if (flags != (CU_HOST_PORTABLE | CU_HOST_MAPPED)) return INVALID_VALUE;
    if (fake_cuda.capturing && capture_mode != CU_CAPTURE_RELAXED) return CAPTURE_UNSUPPORTED;
    static void *pinned[FAKE_CUDA_DEVICES];
    const int i = atomic_fetch_add(&fake_cuda.pinned, 1);
    if (i >= FAKE_CUDA_DEVICES) return CU_OUT_OF_MEMORY;
    *pointer = pinned[i] = aligned_alloc(64, (bytes + 63) / 64 * 64);
    return pinned[i] ? 0 : CU_OUT_OF_MEMORY;
}

FAKE cu_result cuMemcpyHtoDAsync_v2(cu_address to, const void *from, size_t bytes, void *stream)
{
    BEGIN();
    (void)stream;
    NEED_CONTEXT();
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

FAKE cu_result cuMemcpyDtoHAsync_v2(void *to, cu_address from, size_t bytes, void *stream)
{
    BEGIN();
    (void)stream;
    NEED_CONTEXT();
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return 0;
}

FAKE cu_result cuMemGetInfo_v2(size_t *left, size_t *total)
{
    BEGIN();
    NEED_CONTEXT();
    *left = (size_t)140 << 30;
    *total = (size_t)141 << 30;
    return 0;
}

FAKE cu_result cuPointerGetAttributes(unsigned count, int *attributes, void **values,
                                      cu_address pointer)
{
    BEGIN();
    int i = allocation_of(pointer);
    atomic_fetch_add(&fake_cuda.pointers_asked, 1);
    for (unsigned j = 0; j < count; j++) {
        if (attributes[j] == CU_POINTER_MEMORY_TYPE)
            *(unsigned *)values[j] = i < 0 ? 0 : CU_MEMORY_DEVICE;
        else if (attributes[j] == CU_POINTER_DEVICE_ORDINAL)
            *(int *)values[j] = i < 0 ? -2 : allocations[i].device;
        else if (attributes[j] == CU_POINTER_IS_MANAGED) *(unsigned *)values[j] = 0;
        else if (attributes[j] == CU_POINTER_RANGE_START)
            *(cu_address *)values[j] = i < 0 ? 0 : (cu_address)(uintptr_t)allocations[i].memory;
        else if (attributes[j] == CU_POINTER_RANGE_SIZE)
            *(size_t *)values[j] = i < 0 ? 0 : allocations[i].bytes;
        else return INVALID_VALUE;
    }
    return 0;
}

/* ---- images, kernels, launches --------------------------------------------------------------- */

FAKE cu_result cuThreadExchangeStreamCaptureMode(int *mode)
{
    BEGIN();
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}

FAKE cu_result cuStreamIsCapturing(void *stream, int *status)
{
    BEGIN();
    (void)stream;
    *status = fake_cuda.capturing;
    return 0;
}

#ifndef FAKE_CUDA_OLD

/* While a stream is being captured, such queries about it end the capture. */
FAKE cu_result cuStreamGetId(void *stream, unsigned long long *id)
{
    BEGIN();
    if (fake_cuda.capturing) return CAPTURE_UNSUPPORTED;
    *id = (unsigned long long)(uintptr_t)stream;
    return 0;
}

FAKE cu_result cuStreamGetCtx(void *stream, cu_context *context)
{
    BEGIN();
    (void)stream;
    if (fake_cuda.capturing) return CAPTURE_UNSUPPORTED;
    NEED_CONTEXT();
    *context = (cu_context)(uintptr_t)(current + 1);
    return 0;
}

/* There is one graph. It keeps its objects until the test ends it (fake_cuda.h). */
FAKE cu_result cuStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id,
                                         cu_graph *graph, const void **nodes, size_t *num_nodes)
{
    BEGIN();
    (void)stream, (void)id, (void)nodes, (void)num_nodes;
    *status = fake_cuda.capturing;
    *graph = fake_cuda.capturing ? (cu_graph)(void *)&fake_cuda : NULL;
    return 0;
}

typedef struct fake_object {
    void (*destroy)(void *);
    void *data;
} fake_object;

FAKE cu_result cuUserObjectCreate(cu_user_object *object, void *data, void (*destroy)(void *),
                                  unsigned count, unsigned flags)
{
    BEGIN();
    if (count != 1 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) return INVALID_VALUE;
    fake_object *o = malloc(sizeof *o);
    if (!o) return CU_OUT_OF_MEMORY;
    *o = (fake_object){destroy, data};
    *object = (cu_user_object)(void *)o;
    return 0;
}

FAKE cu_result cuUserObjectRelease(cu_user_object object, unsigned count)
{
    BEGIN();
    if (count != 1) return INVALID_VALUE;
    fake_object *o = (fake_object *)(void *)object;
    o->destroy(o->data);
    free(o);
    return 0;
}

FAKE cu_result cuGraphRetainUserObject(cu_graph graph, cu_user_object object, unsigned count,
                                       unsigned flags)
{
    BEGIN();
    if ((void *)graph != (void *)&fake_cuda || count != 1 || flags != CU_GRAPH_USER_OBJECT_MOVE)
        return INVALID_VALUE;
    if (fake_cuda.num_kept == FAKE_CUDA_KEPT) return CU_OUT_OF_MEMORY;
    fake_object *o = (fake_object *)(void *)object;
    fake_cuda.kept[fake_cuda.num_kept].destroy = o->destroy;
    fake_cuda.kept[fake_cuda.num_kept++].data = o->data;
    free(o);
    return 0;
}

/* While a stream is captured, loading needs the relaxed mode. */
static int must_not_load(void) { return fake_cuda.capturing && capture_mode != CU_CAPTURE_RELAXED; }

/* An image is a text, and a library is the same text. */
FAKE cu_result cuLibraryLoadData(cu_library *library, const void *code, int *jit_options,
                                 void **jit_values, unsigned num_jit, int *options, void **values,
                                 unsigned num_options)
{
    BEGIN();
    (void)jit_options, (void)jit_values, (void)options, (void)values;
    if (num_jit || num_options) return INVALID_VALUE;
    if (must_not_load()) return CAPTURE_UNSUPPORTED;
    atomic_fetch_add(&fake_cuda.loads, 1);
    *library = (cu_library)(uintptr_t)code;
    return 0;
}

/* Kernels are "first", "second" and so on: any name that does not begin with "no_". */
FAKE cu_result cuLibraryGetKernel(cu_kernel *kernel, cu_library library, const char *name)
{
    static fake_cuda_kernel kernels[64];
    static atomic_int count;
    BEGIN();
    if (!library || strncmp(name, "no_", 3) == 0) return NOT_FOUND;
    int i = atomic_fetch_add(&count, 1);
    if (i >= 64) return CU_OUT_OF_MEMORY;
    snprintf(kernels[i].name, sizeof kernels[i].name, "%s", name);
    for (int device = 0; device < FAKE_CUDA_DEVICES; device++) kernels[i].max_smem[device] = 49152;
    atomic_fetch_add(&fake_cuda.kernels, 1);
    *kernel = (cu_kernel)&kernels[i];
    return 0;
}

FAKE cu_result cuLibraryGetGlobal(cu_address *address, size_t *bytes, cu_library library,
                                  const char *name)
{
    static const int variable[4] = {1, 2, 3, 4};
    BEGIN();
    NEED_CONTEXT();
    if (!library || strcmp(name, "variable") != 0) return NOT_FOUND;
    *address = (cu_address)(uintptr_t)variable;
    *bytes = sizeof variable;
    return 0;
}

FAKE cu_result cuKernelGetAttribute(int *value, int attribute, cu_kernel kernel, cu_device device)
{
    BEGIN();
    (void)kernel, (void)device;
    *value = attribute == CU_KERNEL_REGISTERS     ? 168
             : attribute == CU_KERNEL_LOCAL_BYTES ? 8
             : attribute == CU_KERNEL_STATIC_SMEM ? 512
                                                  : -1;
    return *value < 0 ? INVALID_VALUE : 0;
}

FAKE cu_result cuKernelSetAttribute(int attribute, int value, cu_kernel kernel, cu_device device)
{
    BEGIN();
    if (attribute != CU_KERNEL_MAX_DYNAMIC_SMEM || value > 232448) return INVALID_VALUE;
    if (must_not_load()) return CAPTURE_UNSUPPORTED;
    atomic_fetch_add(&fake_cuda.opt_ins, 1);
    ((fake_cuda_kernel *)kernel)->max_smem[device] = value;
    return 0;
}

FAKE cu_result cuLaunchKernelEx(const cu_launch_config *config, cu_kernel kernel, void **parameters,
                                void **extra)
{
    BEGIN();
    NEED_CONTEXT();
    const fake_cuda_kernel *known = (const fake_cuda_kernel *)kernel;
    if (extra || (int)config->smem_bytes > known->max_smem[current]) return INVALID_VALUE;
    for (int i = 0; i < 3; i++)
        if (!config->grid[i] || !config->block[i]) return INVALID_VALUE;
    if (config->grid[1] > 65535 || config->grid[2] > 65535) return INVALID_VALUE;
    atomic_fetch_add(&fake_cuda.launches, 1);
    fake_cuda_launch *last = &fake_cuda.last;
    snprintf(last->name, sizeof last->name, "%s", known->name);
    memcpy(last->grid, config->grid, sizeof last->grid);
    memcpy(last->block, config->block, sizeof last->block);
    last->smem_bytes = config->smem_bytes;
    last->stream = config->stream;
    last->first_parameter = *(const int *)parameters[0];
    if (strcmp(known->name, "check_simt") == 0) {
        fake_cuda.reported = ((const fa_check_params *)parameters[0])->report;
        if (!fake_cuda.capturing) *fake_cuda.reported = fake_cuda.finds;
    }
    last->num_attributes = (int)config->num_attributes;
    memset(last->cluster, 0, sizeof last->cluster);
    last->overlaps = 0;
    for (unsigned n = 0; n < config->num_attributes; n++) {
        const cu_launch_attribute *a = &config->attributes[n];
        switch (a->id) {
        case CU_LAUNCH_CLUSTER:
            memcpy(last->cluster, a->value.cluster, sizeof last->cluster);
            break;
        case CU_LAUNCH_OVERLAPS: last->overlaps = a->value.overlaps; break;
        default: return INVALID_VALUE;
        }
    }
    return 0;
}

static uint32_t bytes_of_map_type(int type)
{
    return type == CU_MAP_UINT8 ? 1 : type == CU_MAP_FLOAT16 || type == CU_MAP_BFLOAT16 ? 2 : 4;
}

FAKE cu_result cuTensorMapEncodeTiled(void *map, int type, uint32_t axes, void *base,
                                      const uint64_t *extents, const uint64_t *strides,
                                      const uint32_t *box, const uint32_t *steps, int interleave,
                                      int swizzle, int promotion, int fill)
{
    /* It may be partly written. */
    if (asked_to_fail(__func__)) memset(map, 0xff, sizeof(fake_cuda_map));
    BEGIN();
    atomic_fetch_add(&fake_cuda.maps, 1);
    if ((uintptr_t)base % 16 || axes < 1 || axes > 5 || interleave || fill ||
        box[0] * bytes_of_map_type(type) > 128)
        return INVALID_VALUE;
    fake_cuda_map *encoded = map;
    encoded->base = (uint64_t)(uintptr_t)base;
    encoded->type = type;
    encoded->axes = (int)axes;
    encoded->swizzle = swizzle;
    encoded->promotion = promotion;
    for (uint32_t i = 0; i < axes; i++) {
        if (box[i] < 1 || box[i] > 256 || steps[i] != 1 || !extents[i]) return INVALID_VALUE;
        if (i + 1 < axes && (strides[i] % 16 || strides[i] >> 40)) return INVALID_VALUE;
        encoded->extent[i] = (uint32_t)extents[i];
        encoded->box[i] = (uint16_t)box[i];
        if (i + 1 < axes) encoded->stride[i] = (uint32_t)strides[i];
    }
    return 0;
}

#endif

/* ---- events ---------------------------------------------------------------------------------- */

typedef struct fake_event {
    double milliseconds;
    void *stream; /* on which it has been recorded */
    int recorded;
} fake_event;

FAKE cu_result cuEventCreate(cu_event *event, unsigned flags)
{
    BEGIN();
    NEED_CONTEXT();
    if (flags && flags != CU_EVENT_DISABLE_TIMING) return INVALID_VALUE;
    *event = calloc(1, sizeof(fake_event));
    return *event ? 0 : CU_OUT_OF_MEMORY;
}

FAKE cu_result cuEventDestroy_v2(cu_event event)
{
    BEGIN();
    free(event);
    return 0;
}

/* The test sets the device's time. */
FAKE cu_result cuEventRecord(cu_event event, void *stream)
{
    BEGIN();
    *(fake_event *)(void *)event = (fake_event){fake_cuda.milliseconds, stream, 1};
    atomic_fetch_add(&fake_cuda.events, 1);
    return 0;
}

/* Streams from fake_cuda.busy on have not reached any event. */
FAKE cu_result cuEventQuery(cu_event event)
{
    BEGIN();
    const fake_event *e = (const fake_event *)(const void *)event;
    if (fake_cuda.capturing && capture_mode != CU_CAPTURE_RELAXED) return CAPTURE_UNSUPPORTED;
    const int busy = fake_cuda.busy && (uintptr_t)e->stream >= fake_cuda.busy;
    return e->recorded && busy ? NOT_READY : 0;
}

FAKE cu_result cuEventSynchronize(cu_event event)
{
    BEGIN();
    return event ? 0 : INVALID_VALUE;
}

FAKE cu_result cuEventElapsedTime(float *milliseconds, cu_event begin, cu_event end)
{
    BEGIN();
    *milliseconds =
        (float)(((fake_event *)end)->milliseconds - ((fake_event *)begin)->milliseconds);
    return 0;
}
