/*
 * A piece of work as it is described to the warps.
 */
#ifndef FA_KERNELS_FORWARD_SM90_PIECE_CUH
#define FA_KERNELS_FORWARD_SM90_PIECE_CUH

/* A piece of work as the consumers see it. Its query i may see the keys [lo + i, hi + i), as far as
 * they are in [0, n_k), all counted from start on. */
typedef struct piece {
    fa_tile tile;
    int32_t start, tiles; /* its tiles of keys: so many, from this key on; 0: no piece is left */
    /* How many of them a consumer needs, for it may end early under a causal mask; 0: its rows see
     * nothing, or are none. */
    int32_t mine[CONSUMERS];
    int32_t lo, hi, n_k;
    int32_t queries, room; /* its queries; rows from the first on that are its sequence's own */
    char *out;             /* the first row of its results */
    int32_t full_from[CONSUMERS], full_to[CONSUMERS]; /* tiles that all its rows see as a whole */
    int32_t plain_from[CONSUMERS]; /* the first one before which all have seen something */
    float scale;                   /* to exponents of 2, from what comes to the softmax */
#if OPTIONS
    int32_t options; /* which of OPTIONS */
    float inner;     /* what scores are multiplied by, before their tanh or alone */
    float unit;      /* what makes exponents of e what comes to the softmax */
    float slope;     /* ALiBi's */
#endif
} piece;

#endif
