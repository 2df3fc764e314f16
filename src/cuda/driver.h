/*
 * The CUDA driver (libcuda.so.1), opened at run time, so that a library built with CUDA loads and works
 * on a machine without a driver. Nothing here writes error messages: functions that can fail fill in an
 * fa_cuda_fault and return false.
 *
 * All functions are thread-safe. Unless a function says otherwise, it works in the calling thread's
 * current context, like the driver's own functions.
 */
#ifndef FA_CUDA_DRIVER_H
#define FA_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/device.h"
#include "cuda/tensor_map.h"

/* What failed: the driver's function (or "dlopen", "dlsym"), its code with the driver's name and text
 * for it. */
typedef struct fa_cuda_fault {
    const char *call;
    int code;
    char name[64];  /* "CUDA_ERROR_OUT_OF_MEMORY" */
    char text[192]; /* "out of memory" */
} fa_cuda_fault;

/* ---- The driver and its devices -------------------------------------------------------------- */

/* Opens the driver, once per process. False: there is none, or it is older than CUDA 12.0. */
bool fa_cuda_open(fa_cuda_fault *fault);

/* The driver's version, 13000 for CUDA 13.0, even if it is too old; 0: none. */
int fa_cuda_driver_version(void);

int fa_cuda_device_count(void); /* 0 without a driver */

/* A device's description; read once and kept. */
bool fa_cuda_get_device(int ordinal, fa_cuda_device *device, fa_cuda_fault *fault);

/* The device of the current context; ordinal -1 if no context is current. */
bool fa_cuda_current_device(int *ordinal, fa_cuda_fault *fault);

/* The device on which memory lies; -1: host memory, or memory that the driver does not know. */
int fa_cuda_device_of(const void *pointer);

/* The same, and the allocation of which it is a part: `bytes` from `first` on, or 0 bytes. */
int fa_cuda_allocation_of(const void *pointer, uintptr_t *first, size_t *bytes);

/* Whether this process has loaded the driver in any way. If not, no memory is on a device, so the
 * driver need not be opened to find that out. */
bool fa_cuda_is_loaded(void);

/* Like fa_cuda_device_of, but -1 also for device memory that the host can use. */
int fa_cuda_out_of_reach(const void *pointer);

/* ---- Kernels --------------------------------------------------------------------------------- */

/* A compiled image (a fatbin) that the build embeds. */
typedef struct fa_cuda_image {
    const char *name; /* "forward_simt_d64_bf16" */
    const unsigned char *data, *end;
    _Atomic(void *) loaded; /* written by the functions below only */
} fa_cuda_image;

/* Loads the image at its first use, and finds a kernel in it. Loaded images serve every
 * context of the process (cuLibraryLoadData) and stay loaded. */
bool fa_cuda_find_kernel(fa_cuda_image *image, const char *entry, void **kernel,
                         fa_cuda_fault *fault);

/* Copies a constant of the image (a __device__ variable) to the host; size must be its size or less. */
bool fa_cuda_read_variable(fa_cuda_image *image, const char *variable, void *value, size_t size,
                           fa_cuda_fault *fault);

/* Registers a thread, bytes of local memory (spills), static shared memory. */
typedef struct fa_cuda_kernel_facts {
    int registers, local_bytes, static_smem_bytes;
} fa_cuda_kernel_facts;
bool fa_cuda_kernel_facts_of(void *kernel, int device, fa_cuda_kernel_facts *facts,
                             fa_cuda_fault *fault);

typedef struct fa_cuda_launch {
    int device; /* of the current context; only asked for if there is dynamic memory */
    uint32_t grid[3], threads;
    uint32_t cluster;    /* blocks of a cluster along x; 0 or 1: none */
    bool overlaps;       /* may start while the kernel in front runs, if the driver can do that */
    uint32_t smem_bytes; /* dynamic; more than 48 KiB is opted in to here */
    void *stream;
} fa_cuda_launch;

/* Queues a kernel. parameters: the address of each parameter, at least as many as the kernel has. */
bool fa_cuda_launch_kernel(void *kernel, const fa_cuda_launch *launch, void **parameters,
                           fa_cuda_fault *fault);

/* Finds whether the stream is being captured into a graph, so that nothing may wait for it. False: the driver
 * does not tell. */
bool fa_cuda_capture_status(void *stream, bool *capturing);

/* The stream's id, which no other stream of this process ever gets. */
bool fa_cuda_stream_id(void *stream, unsigned long long *id);

/* The number of the stream's context, which no other context ever gets. */
bool fa_cuda_stream_context(void *stream, unsigned long long *number);

/* release(data) is called, in some thread, when the graph into which the stream is being captured and
 * everything made from it have been destroyed. release must not call the driver. False: the graph does
 * not support this; release is called immediately or soon. */
bool fa_cuda_graph_keep(void *stream, void (*release)(void *data), void *data);

/* Waits until all that has been queued on the stream is done. */
bool fa_cuda_stream_wait(void *stream, fa_cuda_fault *fault);

/* The current context's number, which no other context ever gets. */
bool fa_cuda_context_number(unsigned long long *number, fa_cuda_fault *fault);

/* Host memory that kernels can write at the same address; it lives as long as the current context. */
bool fa_cuda_allocate_pinned(void **memory, size_t bytes, fa_cuda_fault *fault);

/* An event without a time stamp. It counts as done before it is recorded, and when the stream has
 * reached it. */
bool fa_cuda_marker_new(void **event);
bool fa_cuda_event_is_done(void *event);
bool fa_cuda_event_record(void *event, void *stream, fa_cuda_fault *fault);

/* ---- Tensor maps ----------------------------------------------------------------------------- */

/* False, and nothing is written, if the tensor cannot be mapped. This is host work and uses no device.
 * A thread remembers its latest maps; they depend only on the shape. */
bool fa_cuda_encode_map(fa_tensor_map *map, const fa_tensor_map_shape *shape, fa_cuda_fault *fault);

/* ---- Memory, time: for the command, which owns its buffers ----------------------------------- */

/* Makes the device's primary context current in the calling thread. */
bool fa_cuda_use_device(int ordinal, fa_cuda_fault *fault);

bool fa_cuda_allocate(void **pointer, size_t bytes, fa_cuda_fault *fault);
void fa_cuda_free(void *pointer);
bool fa_cuda_copy_in(void *device, const void *host, size_t bytes, fa_cuda_fault *fault);
bool fa_cuda_copy_out(void *host, const void *device, size_t bytes, fa_cuda_fault *fault);
bool fa_cuda_fill(void *device, unsigned char byte, size_t bytes, fa_cuda_fault *fault);
bool fa_cuda_memory_left(size_t *bytes, fa_cuda_fault *fault);
bool fa_cuda_synchronize(fa_cuda_fault *fault);

/* A new stream, not the default one; copies and calls on it run in order. */
bool fa_cuda_stream_new(void **stream, fa_cuda_fault *fault);
void fa_cuda_stream_free(void *stream);
bool fa_cuda_queue_copy_in(void *device, const void *host, size_t bytes, void *stream,
                           fa_cuda_fault *fault);
bool fa_cuda_queue_copy_out(void *host, const void *device, size_t bytes, void *stream,
                            fa_cuda_fault *fault);

bool fa_cuda_event_new(void **event, fa_cuda_fault *fault);
void fa_cuda_event_free(void *event);
/* Waits for both events. */
bool fa_cuda_event_seconds(void *begin, void *end, double *seconds, fa_cuda_fault *fault);

#endif
