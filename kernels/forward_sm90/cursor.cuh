/*
 * Where a consumer is in the block's work: the work tile and its key tile; and the part of the work tile's description
 * that it keeps in registers.
 */
#ifndef FA_KERNELS_FORWARD_SM90_CURSOR_CUH
#define FA_KERNELS_FORWARD_SM90_CURSOR_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

typedef struct cursor {
    int number;          /* of the work tile */
    int tile, key_tiles; /* the key tile; how many there are, 0: this is the end of the work */
    int needed;          /* how many of them this consumer needs */
    uint32_t q;          /* descriptor of its queries */
    tile_count count;    /* of tiles so far, through all work tiles */
#if OPTIONS & FA_SM90_BIAS
    int biases; /* tiles of the bias so far */
#endif
} cursor;

/* Goes to the next work tile, and waits for its description and its queries. */
FA_DEVICE void next_work_tile(const pipeline *pipe, int consumer, cursor *at)
{
    at->number++;
    ptx_mbarrier_wait(&pipe->state->q_full[q_stage(at->number)][consumer], q_parity(at->number));
#if SPLIT /* the first queries may be there before the description */
    ptx_mbarrier_wait(&pipe->state->entry_full[entry_of(at->number)], entry_parity(at->number));
#endif
    const work_tile *w = queue_entry(pipe, at->number);
    at->key_tiles = warp_uniform(w->key_tiles);
    at->needed = warp_uniform(w->needed[consumer]);
    at->tile = 0;
#if CLUSTER > 1
    at->q = ptx_descriptor_low_in_cluster(q_buffer(pipe, at->number, consumer), 0);
#else
    at->q = ptx_descriptor_low(q_buffer(pipe, at->number, consumer), 0);
#endif
}

FA_DEVICE uint64_t *q_empty(const pipeline *pipe, const cursor *at, int consumer)
{
    return &pipe->state->q_empty[q_stage(at->number)][consumer];
}

/* Of a work tile, in registers. */
typedef struct tile_limits {
    int unmasked_from, unmasked_to; /* key tiles that all rows see whole */
    int plain_from; /* the plain ones of these: from the first one before which all rows have seen a key */
    int plain_to; /* to the last one that the consumer needs */
    float scale;  /* to exponents of 2 */
#if HAS_SERIES
    float first, third, fifth, seventh, ninth; /* of the series that replaces tanh: options.cuh */
    float end, top;  /* the largest score in its range, and its exponent */
    float least_top; /* the least largest exponent of a row that may have lower ones */
#endif
#if OPTIONS
    int options; /* one word, for a test in each tile costs a warp about 15 cycles */
#endif
} tile_limits;

#if OPTIONS

/* A kernel with one option is launched only for problems with this option. */
FA_DEVICE int find_tile_options(const work_tile *w)
{
#if SPLIT
    return (void)w, OPTIONS;
#else
    return OPTIONS & (OPTIONS - 1) ? warp_uniform(w->options) : OPTIONS;
#endif
}

#endif

#if HAS_SERIES

/* The least exponent of a row's largest weight with which the row's lowest weights may be lost: all of those below
 * -low together are at most 2^-lost of its sum, and the largest is within the series' range. */
FA_DEVICE float find_least_top(const work_tile *w, float low, float top, float lost)
{
    const float bits = log2f(fmaxf((float)w->n_k, 1.0f));
    return fmaxf(bits + lost - low * w->scale, -top * w->scale);
}

/* Whether the series is the one for a log-sum-exp. */
FA_DEVICE bool is_exact(const fa_attention_params *p) { return HAS_EXACT_SERIES && p->lse; }

FA_DEVICE void find_series(const fa_attention_params *p, const work_tile *w, tile_limits *at)
{
    const bool exact = is_exact(p), any = exact || !p->lse;
    const float most_inner = 1e4f; /* the eighth power of a larger one may overflow */
    /* Above a softcap of 128 the error of a logit, 2.8e-6 of the softcap, is as large as half of float16's last place. */
    const float most_scale = 128 * FA_LOG2E;
    const float square = w->inner * w->inner, first = w->scale * w->inner;
    const float third = square * first, fifth = square * third, seventh = square * fifth;
    at->first = warp_uniform_float((exact ? EXACT_FIRST : SERIES_FIRST) * first);
    at->third = warp_uniform_float((exact ? EXACT_THIRD : SERIES_THIRD) * third);
    at->fifth = warp_uniform_float((exact ? EXACT_FIFTH : SERIES_FIFTH) * fifth);
    at->seventh = warp_uniform_float(EXACT_SEVENTH * seventh);
    const float ninth = EXACT_NINTH * square * seventh;
    const bool fits =
        w->inner < most_inner &&
        (!exact || (w->scale <= most_scale && ninth >= 0x1p-126f && ninth < INFINITY));
    at->ninth = warp_uniform_float(ninth);
    const float end = (exact ? EXACT_END : SERIES_END) / w->inner;
    at->end = warp_uniform_float(any && fits ? end : -1.0f);
    at->top = warp_uniform_float((exact ? EXACT_TOP : SERIES_TOP) * w->scale);
    at->least_top = warp_uniform_float(exact ? find_least_top(w, EXACT_LOW, EXACT_TOP, 20)
                                             : find_least_top(w, SERIES_LOW, SERIES_TOP, 11));
}

#endif

FA_DEVICE tile_limits find_limits(const work_tile *w, int consumer)
{
    tile_limits at;
    at.unmasked_from = warp_uniform(w->unmasked_from[consumer]);
    at.unmasked_to = warp_uniform(w->unmasked_to[consumer]);
    at.plain_from = warp_uniform(w->plain_from[consumer]);
    at.plain_to = min(at.unmasked_to, warp_uniform(w->needed[consumer]));
    at.scale = warp_uniform_float(w->scale);
#if OPTIONS
    at.options = find_tile_options(w);
    /* A bias makes few weights large: without the running max, the error of a result would be 9% larger. */
    if (at.options & FA_SM90_BIAS && !TRACKED) at.plain_from = UNBOUNDED;
    /* Masks by rows may hide a whole tile from a row. */
    if (at.options & FA_SM90_BY_ROWS) at.plain_from = UNBOUNDED;
#endif
    return at;
}

#endif
