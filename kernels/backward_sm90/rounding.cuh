/*
 * ROUNDING variants: the block with the last share of a query tile's dQ loads the sum of the other
 * blocks' shares into its buffer of dQ, adds its own share, rounds the whole and stores it in the
 * caller's rows. So no launch reads the sums again.
 *
 *     store warp   the semaphore says that all other shares are there; the buffer is free
 *                  sum --> buffer (TMA)
 *     consumer     adds the sum to its share; rounded rows --> buffer
 *     store warp   rows --> dq (TMA)
 *
 * use: the number of a use of the buffers of dQ. The first use of a work tile holds no dQ, the next one that of its first tile.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_ROUNDING_CUH
#define FA_KERNELS_BACKWARD_SM90_ROUNDING_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/work.cuh"

#if ROUNDING

/* Whether dQ is whole with the block's share. */
FA_DEVICE bool is_last_share(const block_work *w, int use)
{
    return use - first_count(w) > w->unfinished;
}

/* Whether it is, and there are other shares. */
FA_DEVICE bool gets_sums(const block_work *w, int use)
{
    return use - first_count(w) > max(w->unfinished, w->alone);
}

#if !GIVES_ROOM

/* The parity of the barrier of the sum that is loaded for this use. */
FA_DEVICE int loaded_parity(const block_work *w, int use)
{
    return (use - 1 - max(w->unfinished, w->alone)) & 1;
}

#endif

#endif

#endif
