/*
 * Flat and peaked rows: when a softmax needs no running max in each key tile.
 *
 * A row's weights are 2^(logit - base). In float32 any base works, because the final division cancels it. But weights
 * are rounded to 16 bits for the product with the values, and only a weight that is a power of two has no rounding
 * error. So in a row that a few keys dominate (a peaked row) the largest weight should be a power of two: the base
 * should be the row's max, as in the online softmax. In a row whose weight is spread over many keys (a flat row), a
 * single weight hardly matters, and any base near the max will do. Computing a max in each tile costs up to a sixth of
 * the speed.
 *
 * The sums of weights show which rows are flat: in the key tiles at the start of a row, where maxima are computed, they
 * are many times the largest weight. Flat rows keep their bases until the sum of a thread's weights exceeds a bound.
 * forward_sm90 (tile_softmax.cuh) and forward_sm80 (softmax.cuh) use the numbers below. They differ in the instructions
 * that sum over a warp, and in how peaked a single row may be among flat ones: forward_sm80 decides for each warp,
 * forward_sm90 for a warpgroup.
 */
#ifndef FA_KERNELS_COMMON_FLAT_ROWS_H
#define FA_KERNELS_COMMON_FLAT_ROWS_H

/* Rows are flat if a thread's weights in a key tile (a quarter of the row's) on average add up to this many times the
 * largest weight. Standard normal logits give 4.2 with 128 keys and 3.1 with 80; logits 1.15 times as large give 3.4 and
 * 2.5. */
#define FA_FLAT_SUM(keys) (0.7f + (keys) / 56.0f)

/* The bound of a flat row: the largest weight plus this many times the average. */
#define FA_FLAT_GROWTH 6.0f

/* Rows that see at most this many keys never count as flat. For standard normal logits the error of
 * flat rows is larger than that of an online softmax: 1.07 times in rows of 1024 keys, 1.05 times
 * in 2048, 1.03 times in 4096 and 1.02 times in 8192. The largest error of a result is up to 1.3
 * times as large. Tests of kernels on the CPU have short rows, so they set a smaller number. */
#ifndef FA_SHORT_ROW
#define FA_SHORT_ROW 2048
#endif

/* Whether the rows of a work tile that needs `keys` keys are short in this sense. Under a causal mask
 * without a window they do not count as short: there the error is dominated by the first rows, which
 * see very few keys. */
#define FA_HAS_SHORT_ROWS(p, keys)                                                                 \
    ((keys) <= FA_SHORT_ROW && ((p)->window_left >= 0 || !((p)->causal || (p)->window_right >= 0)))

/* The bound of any row: float16 ends at 2^16. */
#define FA_SUM_BOUND 32768.0f

#endif
