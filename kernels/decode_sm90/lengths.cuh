/*
 * The length of parts where only the device knows the sequences' numbers of keys: all of them together determine it, so that each
 * block has about the same work.
 */
#ifndef FA_KERNELS_DECODE_SM90_LENGTHS_CUH
#define FA_KERNELS_DECODE_SM90_LENGTHS_CUH

#include "decode_sm90/config.cuh"

#include "decode_sm80/work.cuh"

/* Key tiles of all sequences, at most so many of each. Executed by a whole warp; its lanes read the lengths at the same time. */
FA_DEVICE uint32_t count_all_tiles(const fa_decode_params *d, const fa_decode_sm90_params *s)
{
    const fa_attention_params *p = &d->attention;
    const int64_t most = fa_min64(p->max_k, FA_DECODE_SM90_SHARED_KEYS);
    uint32_t sum = 0;
    if (s->share == 0) return 0;
    for (int64_t b = lane_id(); b < p->batch; b += 32) {
        const int64_t keys = FA_READ_LENGTH(p->seqlens_k + b);
        sum += (uint32_t)(fa_max64(0, fa_min64(keys, most)) + KEYS - 1) / KEYS;
    }
#pragma unroll
    for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    return sum;
}

/* The block's work. all: key tiles of all sequences, or 0. */
FA_DEVICE fa_work describe_share(const fa_decode_params *d, const fa_decode_sm90_params *s,
                                 uint32_t all)
{
    fa_work w = describe_work(d, &s->divisors, blockIdx.x);
    if (s->share == 0 || w.parts <= 1) return w;
    w.per_part = max(w.per_part, (int)((uint64_t)all * s->share >> 16) + 1);
    w.parts = (w.tiles + w.per_part - 1) / w.per_part;
    return w;
}
#endif
