/*
 * The score options: scale, softcap, ALiBi, bias, boolean mask and dropout, in the order of flashattn.h. Their
 * arithmetic is defined only here; every forward and backward kernel calls it.
 *
 * Here an option is a function of one score. Kernels apply it in one of three forms:
 *   fa_logit             one score of query i and key j, float32 kernels (and fa_logit_slope for backward)
 *   fa_row_logit         one score of a row, whose addresses and slope are found once (fa_logit_row_of)
 *   score_fragments.cuh  a thread's fragment of a tile, option by option, 16-bit kernels
 *
 * To add an option, or your own score function, add
 *   1. its parameters to params.h (src/cuda/parameters.c fills them in);
 *   2. the check whether it is used: in fa_has_score_options here, fa_has_row_options (score_fragments.cuh),
 *      fa_cuda_changes_scores (src/cuda/family.c; without it forward_sm80 chooses the kernel without options) and
 *      fa_cuda_sm90_options (src/cuda/plan_sm90.c; FA_SM90_BY_ROWS is the general form; without it split keys ignore the option);
 *   3. its function of one score below, and its derivative if the gradient of a score passes through it;
 *   4. a line in each of fa_logit, fa_logit_slope, fa_row_logit and fa_change_row (score_fragments.cuh), and in
 *      forward_sm90/options.cuh if it needs its own form there; forward_sm90/float32_options.cuh has forms for
 *      kernels of float32.
 * The masks by position are not options: fa_tile_visible tells a kernel which keys a row sees, and the kernel hides the
 * others with -infinity.
 *
 * forward_sm90/options.cuh has faster forms of the same functions: scores in other units than powers of 2, so that
 * scale and softcap become part of the exponent's multiply-add; a series for the softcap; ALiBi as a linear function
 * left of the diagonal; a bias that TMA loads; and dropout by 16-bit comparisons in one register.
 */
#ifndef FA_KERNELS_COMMON_SCORE_OPTIONS_CUH
#define FA_KERNELS_COMMON_SCORE_OPTIONS_CUH

#include "common/sequence.cuh"
#include "ptx/convert.cuh"

/* Whether a score needs more than the scale and the masks by position. */
FA_DEVICE bool fa_has_score_options(const fa_attention_params *p)
{
    return p->softcap > 0.0f || p->alibi_slopes || p->bias.data || p->mask.data;
}

/* ---- Scale ----------------------------------------------------------------------------------- */

/* The scale of one batch item and head, with the factors of float8 queries and keys. */
FA_DEVICE float fa_effective_scale(const fa_attention_params *p, const fa_tile *t)
{
    float scale = p->scale;
    if (p->q_descale) scale *= p->q_descale[t->batch * p->heads_kv + t->head_kv];
    if (p->k_descale) scale *= p->k_descale[t->batch * p->heads_kv + t->head_kv];
    return scale;
}

FA_DEVICE float fa_value_descale(const fa_attention_params *p, const fa_tile *t)
{
    return p->v_descale ? p->v_descale[t->batch * p->heads_kv + t->head_kv] : 1.0f;
}

/* ---- Softcap --------------------------------------------------------------------------------- */

FA_DEVICE float fa_softcap_score(float x, float softcap) { return softcap * tanhf(x / softcap); }

/* Its derivative. */
FA_DEVICE float fa_softcap_slope(float x, float softcap)
{
    const float y = tanhf(x / softcap);
    return 1.0f - y * y;
}

/* tanh with an error of 2e-7, relative to the result near 0: by one exponential and one division, or by its series. The
 * special-function unit's tanh has only 11 correct bits: with a softcap of 30 that is an error of 0.015 in the exponent,
 * 2.6 times the effect of rounding to float16 on a peaked row. */
FA_DEVICE float fa_tanh_fast(float x)
{
#ifdef FA_CUDA_ON_CPU
    return tanhf(x);
#else
    const float y = x * x;
    float series = fmaf(y, 0.021869488f, -0.053968254f);
    series = fmaf(series, y, 0.13333333f);
    series = fmaf(series, y, -0.33333333f);
    series = fmaf(series * y, x, x);
    const float far = 1.0f - __fdividef(2.0f, exp2f(x * 2.88539008177792681472f) + 1.0f);
    return fabsf(x) < 0.3f ? series : far;
#endif
}

/* tanh with a relative error of 2e-7, for |x| up to 0.75. */
FA_DEVICE float fa_tanh_small(float x)
{
    const float y = x * x;
    float series = fmaf(y, -0.0047115222f, 0.019576216f);
    series = fmaf(series, y, -0.053341115f);
    series = fmaf(series, y, 0.13325339f);
    series = fmaf(series, y, -0.33332954f);
    series = fmaf(series, y, 0.99999997f);
    return series * x;
}

/* tanh for kernels with errors of float32's size, with a relative error of 2^-23: up to 0.75 by its series (1.7 * 2^-24),
 * above by an exponential and a reciprocal. */
FA_DEVICE float fa_tanh_series(float x)
{
    const float y = x * x;
    float series = fmaf(y, -0.0047694892f, 0.019664912f);
    series = fmaf(series, y, -0.053390257f);
    series = fmaf(series, y, 0.13326521f);
    series = fmaf(series, y, -0.33333069f);
    return fmaf(series * y, x, x);
}

FA_DEVICE float fa_tanh(float x)
{
    const float far =
        fmaf(-2.0f, ptx_rcp(ptx_ex2(fabsf(x) * 2.88539008177792681472f) + 1.0f), 1.0f);
    return fabsf(x) < 0.75f ? fa_tanh_series(x) : copysignf(far, x);
}

/* The softcap for 16-bit kernels. x: the score divided by the softcap. */
FA_DEVICE float fa_softcap_score_fast(float x, float softcap) { return softcap * fa_tanh_fast(x); }

/* ---- ALiBi ----------------------------------------------------------------------------------- */

/* factor: minus the head's slope; distance: from the key to the query's position among the keys. */
FA_DEVICE float fa_alibi_score(float x, float factor, float distance)
{
    return fmaf(factor, fabsf(distance), x);
}

/* ---- Bias and boolean mask ------------------------------------------------------------------- */

/* unit: a logit of 1 in the units of x. */
FA_DEVICE float fa_bias_score(float x, float bias, float unit) { return fmaf(bias, unit, x); }

FA_DEVICE float fa_mask_score(float x, bool sees) { return sees ? x : -INFINITY; }

/* The element of a bias or a mask for query i and key j. */
FA_DEVICE int64_t fa_score_index(const fa_kernel_view *v, const fa_tile *t, int64_t i, int64_t j)
{
    return t->batch * v->stride[0] + t->head * v->stride[1] + i * v->stride[2] + j * v->stride[3];
}

/* ---- All options of one score ---------------------------------------------------------------- */

/* The logit of query i and key j, which the query sees by position. x: the scaled score. */
FA_DEVICE float fa_logit(const fa_attention_params *p, const fa_tile *t, int64_t i, int64_t j,
                         float x)
{
    if (p->softcap > 0.0f) x = fa_softcap_score(x, p->softcap);
    if (p->alibi_slopes) {
        const float slope = p->alibi_slopes[t->batch * p->alibi_batch_stride + t->head];
        x = fa_alibi_score(x, -slope, (float)(i + t->diagonal - j));
    }
    if (p->bias.data)
        x += fa_load_element(p->bias.data, p->bias.dtype, fa_score_index(&p->bias, t, i, j));
    if (p->mask.data)
        x = fa_mask_score(x,
                          ((const uint8_t *)p->mask.data)[fa_score_index(&p->mask, t, i, j)] != 0);
    return x;
}

/* The derivative of fa_logit by x, for a key that is not masked. */
FA_DEVICE float fa_logit_slope(const fa_attention_params *p, float x)
{
    return p->softcap > 0.0f ? fa_softcap_slope(x, p->softcap) : 1.0f;
}

/* The addresses and numbers that all scores of a row share. */
typedef struct fa_logit_row {
    const char *bias;    /* of key 0; NULL: none */
    const uint8_t *mask; /* the same */
    float slope;         /* of ALiBi */
    int64_t center;      /* the query's position among the keys */
} fa_logit_row;

FA_DEVICE fa_logit_row fa_logit_row_of(const fa_attention_params *p, const fa_tile *t, int64_t i)
{
    fa_logit_row row = {0, 0, 0.0f, i + t->diagonal};
    if (p->bias.data)
        row.bias =
            p->bias.data + fa_score_index(&p->bias, t, i, 0) * fa_element_size(p->bias.dtype);
    if (p->mask.data) row.mask = (const uint8_t *)p->mask.data + fa_score_index(&p->mask, t, i, 0);
    if (p->alibi_slopes) row.slope = p->alibi_slopes[t->batch * p->alibi_batch_stride + t->head];
    return row;
}

/* fa_logit for key j of a row, for 16-bit kernels. distance: row->center - j. */
FA_DEVICE float fa_row_logit(const fa_attention_params *p, const fa_logit_row *row, int64_t j,
                             float distance, float x)
{
    if (p->softcap > 0.0f) x = fa_softcap_score_fast(x / p->softcap, p->softcap);
    if (p->alibi_slopes) x = fa_alibi_score(x, -row->slope, distance);
    if (row->bias) x += fa_load_element(row->bias, p->bias.dtype, j * p->bias.stride[3]);
    if (row->mask) x = fa_mask_score(x, row->mask[j * p->mask.stride[3]] != 0);
    return x;
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* The numbers that determine the random bits of one batch item and head, for fa_dropout_block (src/philox.h). */
typedef struct fa_dropout {
    uint64_t seed, offset;
    int64_t batch_head;
} fa_dropout;

FA_DEVICE fa_dropout fa_dropout_of(const fa_attention_params *p, const fa_tile *t)
{
    fa_dropout d;
    d.seed = p->dropout_state ? p->dropout_state[0] : p->dropout_seed;
    d.offset = p->dropout_state ? p->dropout_state[1] : p->dropout_offset;
    d.batch_head = t->batch * p->heads_q + t->head;
    return d;
}

/* The factor of the weight that has these 16 random bits. */
FA_DEVICE float fa_dropout_factor(const fa_attention_params *p, uint32_t bits)
{
    return bits >= p->dropout_threshold ? p->dropout_scale : 0.0f;
}

/* A mask with all bits of the halves of two 16-bit weights that are kept; these are scaled at the end of a row. */
FA_DEVICE uint32_t fa_dropout_mask_x2(const fa_attention_params *p, uint32_t bits)
{
    const uint32_t low = (bits & 0xffffu) >= p->dropout_threshold;
    const uint32_t high = (bits >> 16) >= p->dropout_threshold;
    return low * 0xffffu | high * 0xffff0000u;
}

/* The factors of single weights, one after another. The thread keeps the last block of bits, which neighbours usually
 * share. */
typedef struct fa_dropout_cache {
    fa_dropout dropout;
    int64_t i, j; /* of the block's first column; -1: none yet */
    uint32_t block[4];
} fa_dropout_cache;

FA_DEVICE fa_dropout_cache fa_dropout_cache_of(const fa_attention_params *p, const fa_tile *t)
{
    fa_dropout_cache cache;
    cache.dropout = fa_dropout_of(p, t);
    cache.i = cache.j = -1;
    cache.block[0] = cache.block[1] = cache.block[2] = cache.block[3] = 0;
    return cache;
}

FA_DEVICE float fa_dropout_factor_of(const fa_attention_params *p, fa_dropout_cache *cache,
                                     int64_t i, int64_t j)
{
    const int64_t first = j & ~(int64_t)25; /* bits 0, 3 and 4 choose within the block */
    if (cache->i != i || cache->j != first) {
        fa_dropout_block(cache->dropout.seed, cache->dropout.offset, cache->dropout.batch_head, i,
                         j >> 5, (int)(j >> 1) & 3, cache->block);
        cache->i = i;
        cache->j = first;
    }
    const uint32_t low = j & 8 ? cache->block[1] : cache->block[0];
    const uint32_t high = j & 8 ? cache->block[3] : cache->block[2];
    const uint32_t word = j & 16 ? high : low;
    return fa_dropout_factor(p, j & 1 ? word >> 16 : word & 0xffffu);
}

#endif
