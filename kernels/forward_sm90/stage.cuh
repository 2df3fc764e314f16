/*
 * Stages of the circular pipelines in shared memory. A count gives stage and parity: the number of tiles so far for
 * keys and values, and of work tiles so far for queries. Counts continue from work tile to work tile.
 */
#ifndef FA_KERNELS_FORWARD_SM90_STAGE_CUH
#define FA_KERNELS_FORWARD_SM90_STAGE_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"

typedef uint32_t tile_count;
FA_DEVICE int stage_of(tile_count count) { return (int)(count % STAGES); }
FA_DEVICE int parity_of(tile_count count) { return (int)(count / STAGES & 1); }

/* Of queries. (Unsigned, so that a remainder is one instruction.) */
FA_DEVICE int q_stage(int number) { return (int)((uint32_t)number % Q_STAGES); }
FA_DEVICE int q_parity(int number) { return (int)((uint32_t)number / Q_STAGES & 1); }

#endif
