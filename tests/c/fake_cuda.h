/* What the fake driver (fake_cuda.c) records, in its variable `fake_cuda`. */
#ifndef TEST_FAKE_CUDA_H
#define TEST_FAKE_CUDA_H

#include <stdatomic.h>
#include <stdint.h>

#include "../../kernels/check/check.h"

enum { FAKE_CUDA_DEVICES = 8, FAKE_CUDA_KEPT = 1024 };

typedef struct fake_cuda_launch {
    char name[64];
    unsigned grid[3], block[3], cluster[3], smem_bytes;
    int num_attributes, overlaps, first_parameter;
    void *stream;
} fake_cuda_launch;

typedef struct fake_cuda_record {
    atomic_int inits, attributes_read, loads, kernels, opt_ins, launches, synchronizations,
        allocations, maps, pointers_asked, contexts_asked, streams, waits, pinned, events;
    int capturing;       /* set by the test: loading fails unless the thread's mode is relaxed */
    double milliseconds; /* set by the test: the device's clock */
    fa_check_report
        finds; /* set by the test: what check_simt reports, immediately or in a replay */
    fa_check_report *reported; /* where it is reported */
    uintptr_t busy; /* set by the test: streams with this handle or a larger one are; 0: none */
    /* The objects of the captured graph; the test calls destroy when the graph ends. */
    int num_kept;
    struct {
        void (*destroy)(void *);
        void *data;
    } kept[FAKE_CUDA_KEPT];
    fake_cuda_launch last;
} fake_cuda_record;

typedef struct fake_cuda_kernel {
    char name[64];
    int max_smem[FAKE_CUDA_DEVICES];
} fake_cuda_kernel;

/* What the fake driver writes to a tensor map's 128 bytes. */
typedef struct fake_cuda_map {
    uint64_t base;
    int type, axes, swizzle, promotion;
    uint32_t extent[5], stride[4];
    uint16_t box[5];
} fake_cuda_map;

#endif
