/*
 * What happens to a score between the two products: scale, softcap, ALiBi, bias, masks, dropout,
 * in the order that flashattn.h states. Every kernel comes here.
 */
#ifndef FA_KERNEL_LOGITS_H
#define FA_KERNEL_LOGITS_H

#include "common/sequence.cuh"

/* Whether a score needs more than the scale and the masks by position. */
FA_DEVICE bool fa_is_general(const fa_attention_params *p)
{
    return p->softcap > 0.0f || p->alibi_slopes || p->bias.data || p->mask.data;
}

/* The scale of one batch item and head, with what fp8 inputs stand for. */
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

FA_DEVICE int64_t fa_score_index(const fa_kernel_view *v, const fa_tile *t, int64_t i, int64_t j)
{
    return t->batch * v->stride[0] + t->head * v->stride[1] + i * v->stride[2] + j * v->stride[3];
}

/* The logit of query i and key j, which the query may see by position, from the scaled score. */
FA_DEVICE float fa_general_logit(const fa_attention_params *p, const fa_tile *t, int64_t i,
                                 int64_t j, float x)
{
    if (p->softcap > 0.0f) x = p->softcap * tanhf(x / p->softcap);
    if (p->alibi_slopes) {
        float slope = p->alibi_slopes[t->batch * p->alibi_batch_stride + t->head];
        x = fmaf(-slope, fabsf((float)(i + t->diagonal - j)), x);
    }
    if (p->bias.data)
        x += fa_load_element(p->bias.data, p->bias.dtype, fa_score_index(&p->bias, t, i, j));
    if (p->mask.data && !((const uint8_t *)p->mask.data)[fa_score_index(&p->mask, t, i, j)])
        x = -INFINITY;
    return x;
}

/* The same for kernels whose threads hold many keys of one query, in 16-bit arithmetic: what does not
 * depend on the key is found once. */
typedef struct fa_logit_row {
    const char *bias;    /* of key 0; NULL: none */
    const uint8_t *mask; /* the same */
    float slope;
    int64_t center; /* where the query stands among the keys */
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

/* tanh to 2e-7, near 0 relatively so: by one exponential and one division, or by its series. */
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

/* distance: row->center - j, which is cheaper to know for neighbouring keys. */
FA_DEVICE float fa_row_logit(const fa_attention_params *p, const fa_logit_row *row, int64_t j,
                             float distance, float x)
{
    if (p->softcap > 0.0f) x = p->softcap * fa_tanh_fast(x / p->softcap);
    if (p->alibi_slopes) x = fmaf(-row->slope, fabsf(distance), x);
    if (row->bias) x += fa_load_element(row->bias, p->bias.dtype, j * p->bias.stride[3]);
    if (row->mask && !row->mask[j * p->mask.stride[3]]) x = -INFINITY;
    return x;
}

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

/* The factor of a weight, given its 16 random bits. */
FA_DEVICE float fa_dropout_factor(const fa_attention_params *p, uint32_t bits)
{
    return bits >= p->dropout_threshold ? p->dropout_scale : 0.0f;
}

#endif
