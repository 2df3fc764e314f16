/*
 * The shape of forward_sm80's tiles, for an architecture (80; 75: without asynchronous copies) and a
 * compiled head dim. Shared by the kernel and the planner. The macros that stand in #ifndef may be
 * given on the compiler's command line to try other shapes.
 */
#ifndef FA_KERNEL_FORWARD_SM80_H
#define FA_KERNEL_FORWARD_SM80_H

/* Warps that share rows: each makes the scores of its share of a tile's keys and the output's
 * columns of its share, whose accumulator fits into its registers. */
#ifndef FA_SM80_SPLIT
#define FA_SM80_SPLIT(dim, small) ((dim) < 256 || (small) ? 1 : (dim) == 256 ? 2 : 4)
#endif

/* Rows of a warp, or of the warps that share them. */
#ifndef FA_SM80_ROWS
#define FA_SM80_ROWS(dim, small) ((dim) == 192 || ((dim) == 256 && (small)) ? 16 : 32)
#endif

/* small: 1 for shared memory of 99 KiB (Ada), 2 for 64 KiB (Turing). */
#ifndef FA_SM80_WARPS
#define FA_SM80_WARPS(dim, small) ((dim) <= 192 ? 4 : (small) == 2 ? 3 : (small) ? 4 : 8)
#endif

/* Keys of a tile, a multiple of 32. */
#ifndef FA_SM80_KEYS
#define FA_SM80_KEYS(dim, small) ((small) ? 32 : 64)
#endif

/* Tiles of keys, and of values, that shared memory holds. 1: values are loaded while their keys are
 * used, and keys while the values before them are. */
#ifndef FA_SM80_STAGES
#define FA_SM80_STAGES(dim, small) ((dim) == 64 && !(small) ? 2 : 1)
#endif

/* Blocks of a multiprocessor, at least, which bounds the registers. */
#ifndef FA_SM80_BLOCKS
#define FA_SM80_BLOCKS(dim, small) ((dim) < 256 || (small) ? 2 : 1)
#endif

/* Bytes from one row to the next: 16 more than the row has, an odd number of 16-byte pieces. So the
 * pieces of 8 neighbouring rows lie in 8 different groups of banks. */
#define FA_SM80_PITCH(dim) (2 * (dim) + 16)

#define FA_SM80_THREADS(dim, small) (32 * FA_SM80_WARPS(dim, small))
#define FA_SM80_QUERIES(dim, small)                                                                \
    (FA_SM80_ROWS(dim, small) * FA_SM80_WARPS(dim, small) / FA_SM80_SPLIT(dim, small))

/* Bytes that warps which share rows pass to each other: weights, and a number for each warp and row. */
#define FA_SM80_WEIGHTS_PITCH(dim, small) (2 * FA_SM80_KEYS(dim, small) + 16)
#define FA_SM80_SHARED(dim, small)                                                                 \
    (FA_SM80_SPLIT(dim, small) == 1                                                                \
         ? 0                                                                                       \
         : FA_SM80_QUERIES(dim, small) * FA_SM80_WEIGHTS_PITCH(dim, small) +                       \
               4 * FA_SM80_ROWS(dim, small) * FA_SM80_WARPS(dim, small))

/* Tasks are described so many at a time, at most twice as many ahead; and the bytes of a description. */
#define FA_SM80_AHEAD(small) ((small) ? 4 : 8)
#define FA_SM80_TASK_BYTES 288

/* Bytes of dynamic shared memory: queries, keys, values, what is passed, descriptions. */
#define FA_SM80_SMEM(dim, small)                                                                   \
    (FA_SM80_PITCH(dim) * (FA_SM80_QUERIES(dim, small) +                                           \
                           2 * FA_SM80_STAGES(dim, small) * FA_SM80_KEYS(dim, small)) +            \
     FA_SM80_SHARED(dim, small) + 2 * FA_SM80_AHEAD(small) * FA_SM80_TASK_BYTES)

#endif
