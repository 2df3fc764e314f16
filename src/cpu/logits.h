/*
 * Turns a row of scores into logits, between the two products: scale, softcap, ALiBi, bias, masks, in
 * the order of flashattn.h. Forward, backward, decode and weights all use this code.
 */
#ifndef FA_CPU_LOGITS_H
#define FA_CPU_LOGITS_H

#include "../mask.h"
#include "../philox.h"
#include "rows.h"
#include "vmath.h"

/* The place of a row of scores: batch item, query head, query, and the keys that it may see. */
typedef struct fa_row {
    int64_t batch, head, query;
    fa_range visible;
    const fa_sequence *sequence;
} fa_row;

/* Scores that only need a positive scale are not changed; the exponential includes the scale. All other
 * scores become logits first (general), also for a scale so small that 151/scale overflows. */
static inline bool fa_is_general(const fa_problem *p, float scale)
{
    return p->softcap > 0 || p->alibi_slopes || p->bias.data || p->mask.data ||
           !(scale > 1e-20f && scale < 1e20f);
}

/* The scale of one batch item and head, including the descales of float8 inputs. */
static inline float fa_effective_scale(const fa_problem *p, int64_t b, int64_t head_kv)
{
    float scale = p->scale;
    if (p->q_descale) scale *= p->q_descale[b * p->heads_kv + head_kv];
    if (p->k_descale) scale *= p->k_descale[b * p->heads_kv + head_kv];
    return scale;
}

static inline float fa_value_descale(const fa_problem *p, int64_t b, int64_t head_kv)
{
    return p->v_descale ? p->v_descale[b * p->heads_kv + head_kv] : 1.0f;
}

static inline void fa_add_alibi(const fa_problem *p, const fa_row *row, float *x, int64_t j0,
                                int64_t n)
{
    const float slope = p->alibi_slopes[row->batch * p->alibi_batch_stride + row->head];
    const int64_t distance = row->query + row->sequence->diagonal - j0; /* of column 0 */
    const vf minus_slope = v_set1(-slope);
    for (int64_t c = 0; c < n; c += VL) {
        vf d = v_sub(v_set1((float)(distance - c)), v_iota());
        v_store(x + c, v_fma(minus_slope, v_abs(d), v_load(x + c)));
    }
}

/* The address of element (batch, head, query, key) of a bias, mask or weights view. */
FA_INLINE char *fa_score_address(const fa_view *v, int64_t b, int64_t h, int64_t i, int64_t j)
{
    static const int8_t size[] = {4, 2, 2, 1, 1, 1};
    return v->data + (b * v->stride[0] + h * v->stride[1] + i * v->stride[2] + j * v->stride[3]) *
                         size[v->dtype];
}

enum { FA_CHUNK = 128 }; /* columns of bias or mask fetched at a time */

static inline void fa_add_bias(const fa_problem *p, const fa_row *row, float *x, int64_t j0,
                               int64_t n)
{
    float chunk[FA_CHUNK];
    for (int64_t c = 0; c < n; c += FA_CHUNK) {
        int64_t count = fa_min(FA_CHUNK, n - c);
        fa_load_strided(chunk,
                        fa_score_address(&p->bias, row->batch, row->head, row->query, j0 + c),
                        p->bias.dtype, p->bias.stride[3], count);
        for (int64_t t = 0; t < count; t++) x[c + t] += chunk[t];
    }
}

static inline void fa_apply_mask(const fa_problem *p, const fa_row *row, float *x, int64_t j0,
                                 int64_t n)
{
    const uint8_t *mask =
        (const uint8_t *)fa_score_address(&p->mask, row->batch, row->head, row->query, j0);
    const int64_t stride = p->mask.stride[3];
    for (int64_t c = 0; c < n; c++)
        if (!mask[c * stride]) x[c] = -INFINITY;
}

/* x = softcap * tanh(x / softcap); slope (or NULL) gets its derivative. */
static inline void fa_apply_softcap(float softcap, float *x, int64_t n, float *slope)
{
    const vf cap = v_set1(softcap), one = v_set1(1.0f);
    for (int64_t c = 0; c < n; c += VL) {
        const vf t = v_tanh(v_div(v_load(x + c), cap));
        v_store(x + c, v_mul(cap, t));
        if (slope) v_store(slope + c, v_sub(one, v_mul(t, t)));
    }
}

/* Scores x[0..n) of keys j0.. become logits; all these keys must exist. x and slope (may be NULL) have
 * room for whole vectors. */
static inline void fa_scores_to_logits(const fa_problem *p, const fa_row *row, float scale,
                                       float *x, int64_t j0, int64_t n, float *slope)
{
    const vf s = v_set1(scale);
    for (int64_t c = 0; c < n; c += VL) v_store(x + c, v_mul(s, v_load(x + c)));
    if (p->softcap > 0) fa_apply_softcap(p->softcap, x, n, slope);
    if (p->alibi_slopes) fa_add_alibi(p, row, x, j0, n);
    if (p->bias.data) fa_add_bias(p, row, x, j0, n);
    if (p->mask.data) fa_apply_mask(p, row, x, j0, n);
}

/* Philox blocks for 128 columns at a time: 16 independent counters, so that the compiler can keep them
 * in vectors. keep[c] becomes the factor of column j0 + c: 1/(1-p) or 0. j0 is a multiple of 32. */
static inline void fa_dropout_factors(const fa_problem *p, const fa_row *row, float *keep,
                                      int64_t j0, int64_t n)
{
    const int64_t batch_head = row->batch * p->heads_q + row->head;
    for (int64_t c = 0; c < n; c += FA_CHUNK) {
        uint32_t block[16][4];
        for (int t = 0; t < 16; t++)
            fa_dropout_block(p->dropout_seed, p->dropout_offset, batch_head, row->query,
                             (j0 + c) / 32 + t / 4, t % 4, block[t]);
        int64_t count = fa_min(FA_CHUNK, n - c);
        for (int64_t e = 0; e < count; e++) {
            uint32_t word = block[(e >> 5) * 4 + ((e >> 1) & 3)][(e >> 3) & 3];
            uint32_t bits = (e & 1) ? word >> 16 : word & 0xffffu;
            keep[c + e] = bits >= p->dropout_threshold ? p->dropout_scale : 0.0f;
        }
    }
}

#endif
