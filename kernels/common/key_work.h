/*
 * How blocks that own the gradients of keys find their work without a division and without a look at
 * lengths, for which the first of their loads would wait. The kernels and the planner share it.
 */
#ifndef FA_KERNELS_COMMON_KEY_WORK_H
#define FA_KERNELS_COMMON_KEY_WORK_H

#include <stdint.h>

#include "divide.h"

/* Of heads whose blocks take turns. */
typedef struct fa_turns {
    fa_reciprocal blocks;      /* of a group */
    fa_reciprocal heads, rest; /* of a group, of the last one */
} fa_turns;

typedef struct fa_key_divisors {
    int32_t heads;                 /* key/value heads of all items, or splits of them */
    int32_t group;                 /* query heads that share keys */
    fa_reciprocal tiles, heads_kv; /* key tiles of a head; heads of an item */
    fa_turns together;
} fa_key_divisors;

/* If all sequences have the same lengths, and sums of the mask's numbers cannot overflow. */
typedef struct fa_uniform_lengths {
    int32_t applies;
    int32_t n_q, n_k;
    int32_t has_first, has_end; /* whether the mask hides queries before, or after, others */
    int32_t first_query,
        end_query;              /* key j is seen by the queries [first_query + j, end_query + j) */
    int32_t keys_from, keys_to; /* keys that some query sees */
    int32_t queries_from, queries_to; /* queries that see some key */
} fa_uniform_lengths;

#endif
