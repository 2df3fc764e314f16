#define FA_CUDA_ON_CPU 1
#define ELEMENT FA_ELEMENT_BFLOAT16

#include "hopper_units_kernels.h"

#include "common/dialect.h"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/store.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

/* ---- Bulk copies and sums -------------------------------------------------------------------- */

static void load_row(char *row, uint64_t *full, const sums_parameters *p)
{
    const int bytes = SUM_FLOATS * (int)sizeof(float);
    const int more = p->mistake == LOAD_MORE_BYTES    ? 16
                     : p->mistake == LOAD_FEWER_BYTES ? -16
                     : p->mistake == LOAD_ODD_BYTES   ? -8
                     : p->mistake == LOAD_OUTSIDE     ? 1024
                                                      : 0;
    ptx_mbarrier_arrive_expect(full, p->mistake == LOAD_OUTSIDE ? bytes + more : bytes);
    ptx_bulk_load(row + (p->mistake == LOAD_TO_MISALIGNED ? 8 : 0),
                  p->from + (p->mistake == LOAD_MISALIGNED ? 1 : 0), full, bytes + more);
}

static void add_row(float *sums, const sums_parameters *p)
{
    const int bytes = SUM_FLOATS * (int)sizeof(float);
    ptx_bulk_add_f32(p->to + (p->mistake == ADD_OUTSIDE ? 4096 : 0), sums,
                     bytes - (p->mistake == ADD_ODD_BYTES ? 4 : 0));
    if (p->mistake != ADD_NOT_COMMITTED) ptx_bulk_commit();
}

/* All threads store, and one of them adds. */
static void add_step(float *sums, const float *row, int step, const sums_parameters *p)
{
    const int n = (int)threadIdx.x;
    sums[n] = 1000 * row[n] + (float)step;
    if (p->mistake != ADD_WITHOUT_FENCE &&
        !(p->mistake == ADD_WITHOUT_FENCE_OF_ONE && threadIdx.x == 77))
        ptx_fence_proxy_async();
    if (p->mistake != ADD_WITHOUT_BARRIER) __syncthreads();
    if (threadIdx.x == 0) {
        add_row(sums, p);
        if (p->mistake != SOURCE_NOT_WAITED_FOR && step + 1 < SUM_STEPS) ptx_bulk_wait_read(0);
    }
    __syncthreads();
}

static void add_in_order(float *sums, const sums_parameters *p)
{
    static const float terms[] = {0x1p30f, -0x1p30f, 1};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 4; j++) sums[4 * i + j] = terms[i];
        ptx_fence_proxy_async();
        ptx_bulk_add_f32(p->to + SUM_FLOATS, sums + 4 * i, 16);
        ptx_bulk_commit();
        if (p->ordered) ptx_bulk_wait(0);
    }
}

void sum_rows(sums_parameters p)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ uint64_t full;
    float *row = memory, *sums = memory + SUM_FLOATS, *few = sums + SUM_FLOATS;
    if (threadIdx.x == 0) {
        ptx_mbarrier_init(&full, 1);
        ptx_mbarrier_init_fence();
        load_row((char *)row, &full, &p);
    }
    __syncthreads();
    if (p.mistake != LOAD_NOT_WAITED_FOR) ptx_mbarrier_wait(&full, 0);
    for (int step = 0; step < SUM_STEPS; step++) add_step(sums, row, step, &p);
    if (p.mistake == LOAD_NOT_WAITED_FOR) ptx_mbarrier_wait(&full, 0);
    if (threadIdx.x != 0) return;
    add_in_order(few, &p);
    if (p.mistake != END_NOT_WAITED_FOR) ptx_bulk_wait_read(0);
}

/* ---- Matrices -------------------------------------------------------------------------------- */

void turn_matrices(matrices_parameters p)
{
    FA_DYNAMIC_SHARED(memory);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint16_t *mine = (uint16_t *)memory + warp * 256;
    uint32_t x[4], y[4];
    for (int i = 0; i < 4; i++) x[i] = p.x[i][lane];
    const uint32_t address = ptx_shared_address(mine + 8 * lane);
    ptx_stmatrix_x4_trans(address, x);
    __syncwarp();
    for (uint32_t i = lane; i < 256; i += 32) p.stored[warp * 256 + i] = mine[i];
    ptx_ldmatrix_x4_trans(y, address);
    for (int i = 0; i < 4; i++) p.back[warp][i][lane] = y[i];
}

/* ---- Products -------------------------------------------------------------------------------- */

/* 64 rows of 64 elements, half a row for each thread. In words: a larger copy may be a call that
 * compilers do not check. */
static void store_swizzled(char *to, const uint16_t *from)
{
    const uint32_t row = threadIdx.x / 2, half = threadIdx.x % 2;
    const uint32_t *words = (const uint32_t *)(const void *)(from + row * 64);
    for (uint32_t i = 16 * half; i < 16 * half + 16; i++)
        *(uint32_t *)(void *)(to + row * 128 + (i / 4 ^ row % 8) * 16 + i % 4 * 4) = words[i];
}

static void multiply_step(float *d, const uint16_t *a, const char *in_shared, int step,
                          const product_parameters *p)
{
    const char *b = in_shared + 64 * 128;
    const uint64_t along_a = ptx_matrix_descriptor(in_shared, 1024, 0) + (uint64_t)(step * 32 / 16);
    const uint64_t across_a = ptx_matrix_descriptor(in_shared + step * 16 * 128, 1024, 0);
    const int first = p->first + (p->other == (int)threadIdx.x ? 8 : 0);
    const uint64_t across_b =
        ptx_matrix_descriptor(b + step * 16 * 128, 1024, 0) + (uint64_t)(first * 2 / 16);
    const uint64_t along_b =
        ptx_matrix_descriptor(b, 1024, 0) + (uint64_t)(p->first * 128 / 16 + step * 32 / 16);
    switch (p->how) {
    case A_IN_SHARED: ptx_wgmma_shared_pv_32(d, along_a, across_b, step > 0); return;
    case B_ALONG_ROWS: ptx_wgmma_qk_32(d, along_a, along_b, step > 0); return;
    case A_ACROSS_ROWS: ptx_wgmma_vp_32(d, across_a, along_b, step > 0); return;
    default: ptx_wgmma_pv_32(d, (const uint32_t *)(const void *)a, across_b, step > 0); return;
    }
}

void multiply_columns(product_parameters p)
{
    FA_DYNAMIC_SHARED(memory);
    char *shared = (char *)memory + (1024 - ptx_shared_address(memory) % 1024) % 1024;
    const uint32_t thread = threadIdx.x, g = thread % 32 / 4, t = thread % 4;
    const uint32_t row = thread / 32 * 16 + g;
    float d[16];
    _Alignas(4) uint16_t a[4][8];
    store_swizzled(shared, p.a);
    store_swizzled(shared + 64 * 128, p.b);
    if ((int)thread != p.unfenced) ptx_fence_proxy_async();
    __syncthreads();
    for (uint32_t i = 0; i < 32; i++)
        a[i / 8][i % 8] =
            p.a[(row + 8 * (i % 8 / 2 % 2)) * 64 + i / 8 * 16 + i % 8 / 4 * 8 + 2 * t + i % 2];
    ptx_wgmma_fence();
    for (int step = 0; step < 4; step++) multiply_step(d, a[step], shared, step, &p);
    ptx_wgmma_commit();
    ptx_wgmma_wait(0);
    for (uint32_t i = 0; i < 16; i++)
        p.d[(row + 8 * (i / 2 % 2)) * 32 + i / 4 * 8 + 2 * t + i % 2] = d[i];
}

/* ---- Turns ----------------------------------------------------------------------------------- */

enum { WARP = 32, TURN_THREADS = 2 * WARP };

void take_turns(turns_parameters p)
{
    __shared__ uint64_t arrived;
    const uint32_t warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) {
        ptx_mbarrier_init(&arrived, WARP);
        ptx_mbarrier_init_fence();
    }
    __syncthreads();
    if (warp == 0) {
        if (p.named) ptx_named_barrier_arrive(1, TURN_THREADS);
        else ptx_mbarrier_arrive(&arrived);
        ptx_named_barrier_sync(2, TURN_THREADS);
        ptx_named_barrier_sync(2, TURN_THREADS);
    }
    if (warp == 1) {
        if (p.named) ptx_named_barrier_sync(1, TURN_THREADS);
        else ptx_mbarrier_wait(&arrived, 0);
        ptx_named_barrier_arrive(2, TURN_THREADS);
        __syncwarp();
        ptx_named_barrier_arrive(2, TURN_THREADS);
    }
}
