/*
 * Flat and peaked rows: when a softmax needs no running max in each key tile.
 *
 * A row's weights are 2^(logit - base). Any base is exact in float32: the final division takes it out again. But
 * weights are rounded to 16 bits for the product with the values, and a weight that is a power of two needs no
 * rounding. So in a row that a few keys dominate (a peaked row) the largest weight should be one: the base should
 * be the row's max, as in the online softmax. In a row that many keys share (a flat row), one weight hardly
 * counts, and any base near the max does. A max in each tile costs up to a sixth of the speed.
 *
 * The sums of weights tell which rows are flat: in the key tiles at the start of a row, which have maxima, they
 * are many times the largest weight. Flat rows keep their bases until the sum of a thread's weights is beyond a
 * bound. forward_sm90 (tile_softmax.cuh) and forward_sm80 (softmax.cuh) judge by the numbers below. They differ in
 * the instructions that add up a warp's sums, and in how peaked one row may be among flat ones: forward_sm80
 * judges each warp, forward_sm90 a warpgroup.
 */
#ifndef FA_KERNELS_COMMON_FLAT_ROWS_H
#define FA_KERNELS_COMMON_FLAT_ROWS_H

/* Rows are flat if a thread's weights in a key tile, a quarter of the row's, add up to this times the largest, on average.
 * Standard normal logits give 4.2 with 128 keys and 3.1 with 80; logits 1.15 times as large give 3.4 and 2.5. */
#define FA_FLAT_SUM(keys) (0.7f + (keys) / 56.0f)

/* The bound of a flat row: so many times the average, on top of the largest weight. */
#define FA_FLAT_GROWTH 6.0f

/* Rows that see at most so many keys never count as flat. For standard normal logits the error of
 * flat rows is larger than that of an online softmax: 1.07 times in rows of 1024 keys, 1.05 times
 * in 2048, 1.03 times in 4096 and 1.02 times in 8192. The largest error of a result is up to 1.3
 * times as large. Tests of kernels on the CPU, whose rows are short, set a smaller number. */
#ifndef FA_SHORT_ROW
#define FA_SHORT_ROW 2048
#endif

/* Whether the rows of a work tile that needs `keys` keys are short in this sense. Under a causal
 * mask without a window they are not: there the first rows, which see very few keys, decide the
 * error. */
#define FA_HAS_SHORT_ROWS(p, keys)                                                                 \
    ((keys) <= FA_SHORT_ROW && ((p)->window_left >= 0 || !((p)->causal || (p)->window_right >= 0)))

/* The bound of any row: float16 ends at 2^16. */
#define FA_SUM_BOUND 32768.0f

#endif
