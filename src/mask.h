/*
 * Which keys a query sees by position (causal, diagonal, window, chunks). Every backend uses this code, including
 * kernels. A boolean mask may hide more keys.
 */
#ifndef FA_MASK_H
#define FA_MASK_H

#include <stdint.h>

/* Kernels define this themselves before they include this header. */
#ifndef FA_SHARED_FUNCTION
#define FA_SHARED_FUNCTION static inline
#endif

/* Keys [lo, hi); hi <= lo: none. Neither end decreases as i grows, so the range of a tile of queries
 * [i0, i1) is [range(i0).lo, range(i1 - 1).hi). */
typedef struct fa_range {
    int64_t lo, hi;
} fa_range;

/* center is i + diagonal; a window of -1 has no limit. */
FA_SHARED_FUNCTION fa_range fa_visible_keys(int causal, int64_t window_left, int64_t window_right,
                                            int64_t n_k, int64_t center)
{
    fa_range r = {0, n_k};
    if (causal && center < r.hi - 1) r.hi = center + 1;
    if (window_right >= 0 && window_right < r.hi - 1 - center) r.hi = center + window_right + 1;
    if (window_left >= 0 && window_left < center) r.lo = center - window_left;
    if (r.hi < 0) r.hi = 0;
    if (r.lo > r.hi) r.lo = r.hi;
    return r;
}

/* Reduces the range to the query's chunk of `chunk` positions. start: the first position of that chunk. A query
 * before all keys (center < 0) has none. */
FA_SHARED_FUNCTION fa_range fa_visible_in_chunk(fa_range r, int64_t chunk, int64_t center,
                                                int64_t start)
{
    if (center < 0) r.hi = 0;
    else if (start + chunk < r.hi) r.hi = start + chunk;
    if (center >= 0 && start > r.lo) r.lo = start;
    if (r.lo > r.hi) r.lo = r.hi;
    return r;
}

#ifndef FA_DEVICE_CODE
#include "problem.h"

static inline fa_range fa_visible(const fa_problem *p, const fa_sequence *s, int64_t i)
{
    const int64_t center = i + s->diagonal, chunk = p->attention_chunk;
    const fa_range r = fa_visible_keys(p->causal, p->window_left, p->window_right, s->n_k, center);
    return chunk ? fa_visible_in_chunk(r, chunk, center, center - center % chunk) : r;
}
#endif

#endif
