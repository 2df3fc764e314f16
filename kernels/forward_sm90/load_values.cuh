/*
 * Loads values to shared memory, without those that no query may see. Shared with forward_sm90_wide.
 */
#ifndef FA_KERNELS_FORWARD_SM90_LOAD_VALUES_CUH
#define FA_KERNELS_FORWARD_SM90_LOAD_VALUES_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* Clears rows outside [from, to) of a box. TMA also loads values of keys that no query of the sequence may
 * see. They may hold NaN, and 0 * NaN is NaN. The whole warp. */
FA_DEVICE void clear_values(char *shared, int rows, int64_t from, int64_t to)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int block = 0; block < V_BLOCKS; block++)
#pragma unroll 1
        for (int at = lane * 16; at < rows * 128; at += 32 * 16)
            if (at / 128 < from || at / 128 >= to)
                *(float4 *)(shared + block * rows * 128 + at) = make_float4(0, 0, 0, 0);
    ptx_fence_proxy_async();
    __syncwarp();
}

/* Whether a box holds values that must be cleared. After the tensor's end TMA writes zeros itself. */
FA_DEVICE bool has_values_to_clear(const fa_attention_params *p, const fa_tile *t,
                                   const fa_range *seen, const kv_box *box)
{
    const bool zeros_behind = !p->block_table && t->start_k + seen->hi == p->rows_k;
    return box->key < seen->lo || (box->key + box->rows > seen->hi && !zeros_behind);
}

/* Loads a box of values, and clears values that no query may see before the full barrier's phase ends.
 * cleared: counts the boxes that were cleared so far. */
FA_DEVICE void load_values(const pipeline *pipe, const fa_attention_params *p,
                           const fa_sm90_params *s, const fa_tile *t, const kv_box *box,
                           const lane_rows *own, char *shared, uint64_t *full, int *cleared)
{
    const fa_range seen = find_seen_keys(p, t);
    if (!has_values_to_clear(p, t, &seen, box)) {
        load_box(shared, &s->v, &s->v_step, full, box, own, t);
        return;
    }
    uint64_t *loaded = &pipe->state->v_loaded;
    load_box(shared, &s->v, &s->v_step, loaded, box, own, t);
    ptx_mbarrier_wait(loaded, *cleared & 1);
    *cleared += 1;
    clear_values(shared, box->rows, seen.lo - box->key, seen.hi - box->key);
    if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(full);
}

#endif
