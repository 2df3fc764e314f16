/*
 * Which keys a query sees by position (causal, diagonal, window). One place for every backend; a
 * boolean mask comes on top.
 */
#ifndef FA_MASK_H
#define FA_MASK_H

#include "problem.h"

/* Keys [lo, hi); hi <= lo: none. Both ends never decrease with i, so the range of a tile of
 * queries [i0, i1) is [range(i0).lo, range(i1 - 1).hi). */
typedef struct fa_range {
    int64_t lo, hi;
} fa_range;

static inline fa_range fa_visible(const fa_problem *p, const fa_sequence *s, int64_t i)
{
    const int64_t center = i + s->diagonal;
    fa_range r = {0, s->n_k};
    if (p->causal && center < r.hi - 1) r.hi = center + 1;
    if (p->window_right >= 0 && p->window_right < r.hi - 1 - center)
        r.hi = center + p->window_right + 1;
    if (p->window_left >= 0 && p->window_left < center) r.lo = center - p->window_left;
    if (r.hi < 0) r.hi = 0;
    if (r.lo > r.hi) r.lo = r.hi;
    return r;
}

#endif
