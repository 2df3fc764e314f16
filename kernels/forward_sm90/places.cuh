/*
 * Where things lie that are used in turn, and which rows are a thread's.
 */
#ifndef FA_KERNELS_FORWARD_SM90_PLACES_CUH
#define FA_KERNELS_FORWARD_SM90_PLACES_CUH

/* Stages are used in turn, through all pieces: the count of tiles so far tells stage and parity. */
typedef uint32_t tile_count;
FA_DEVICE int stage_of(tile_count count) { return (int)(count % STAGES); }
FA_DEVICE int parity_of(tile_count count) { return (int)(count / STAGES & 1); }

/* Places of queries likewise, by the piece's number. (Unsigned: a remainder is one instruction then.) */
FA_DEVICE int q_stage(int number) { return (int)((uint32_t)number % Q_STAGES); }
FA_DEVICE int q_parity(int number) { return (int)((uint32_t)number / Q_STAGES & 1); }
FA_DEVICE char *q_place(const pipeline *pipe, int number, int consumer)
{
    return pipe->q + (q_stage(number) * CONSUMERS + consumer) * Q_BYTES;
}

/* Lets the compiler know that a value is the same in all lanes. */
FA_DEVICE int same_for_warp(int x) { return __shfl_sync(0xffffffff, x, 0); }

/* The same for what the compiler would otherwise find anew in each tile, by a long chain. */
FA_DEVICE uint32_t kept(uint32_t x) { return __reduce_or_sync(0xffffffff, x); }

/* Rows r of a thread, of a piece's queries. */
FA_DEVICE int row_of(int consumer, int r)
{
    return consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16 + (int)threadIdx.x % 32 / 4 +
           8 * r;
}

#endif
