/*
 * Computes logits from scores: the scale, options, masks by position. Shared with
 * decode_latent_sm90.
 */
#ifndef FA_KERNELS_DECODE_SM80_LOGITS_CUH
#define FA_KERNELS_DECODE_SM80_LOGITS_CUH

#include "decode_sm80/config.cuh"

#include "common/score_fragments.cuh"
#include "decode_sm80/bases.cuh"
#include "decode_sm80/fragments.cuh"
#include "decode_sm80/work.cuh"

/* Whether there are options that are read or computed row by row. */
FA_DEVICE bool has_row_options(const fa_decode_params *d)
{
    return OPTIONS && fa_has_row_options(&d->attention);
}

/* Options and the mask by position of one row of a thread. first: the tile's first key; options:
 * whether there may be some. */
FA_DEVICE void change_row(const fa_decode_params *d, const fa_work *w, int first, int m, int half,
                          bool options, fa_scores *s)
{
    const fa_attention_params *p = &d->attention;
    const int r = row_of(m, half), key = first + lane_id() % 4 * 2;
    const int64_t i = w->tile.first + min(query_of(d, r), w->queries - 1);
    const fa_range range = fa_tile_visible(p, &w->tile, i);
    const int lo = (int)range.lo - key, hi = (int)range.hi - key;
    if (options && has_row_options(d)) {
        fa_tile t = w->tile;
        t.head += min(head_of(d, r), w->heads - 1);
        const fa_fragment_row row = {fa_logit_row_of(p, &t, i), key, lo, hi};
        fa_change_row(p, s->at[m][0], half, &row);
    }
    fa_hide_fragment(s->at[m][0], half, lo, hi);
}

/* Replaces scores by logits, as exponents of 2. */
FA_DEVICE void make_logits(const fa_decode_params *d, const fa_work *w, int first, fa_scores *s)
{
    const bool masked = first < w->all_from || first + FRAGMENT_KEYS > w->all_to;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        fa_scale_fragment(&d->attention, d->attention.scale, s->at[m][0]);
    if (!masked && !has_row_options(d)) return;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) change_row(d, w, first, i / 2, i % 2, true, s);
}

/* Whether a row can have a weight of 0 for a key whose value is read. */
FA_DEVICE bool hides_keys(const fa_decode_params *d, const fa_work *w, int first)
{
    if (OPTIONS && (d->attention.bias.data || d->attention.mask.data)) return true;
    return max(first, w->from) < w->all_from || min(first + KEYS, w->to) > w->all_to;
}

#endif
