/*
 * Attention forward on Hopper's tensor cores for head dims of 257 to 512: float16 and bfloat16, float32
 * sums, masks by position and lengths alone.
 *
 * The outputs of 64 queries do not fit into a warpgroup's registers here. So two blocks, a cluster, work
 * on the same piece of 128 queries, and each computes half of the columns of the outputs. Each finds the
 * scores of half of a tile's keys; they tell each other the maxima of rows (exchange.cuh), so that
 * both weigh by the same base, and the weights, which lie in shared memory. A block then loads half of the
 * keys and half of the values' columns of each tile, and nothing is computed twice.
 *
 * Blocks stay, warpgroups have their roles, and pieces are described as in forward_sm90.cu. Keys and values
 * come in chunks, through one ring of STAGES places (loads.cuh), for two whole tiles would not
 * fit beside the queries.
 *
 * Compiled with the numbers of a row of kernels/variants.h: ELEMENT, HEAD_DIM, VALUE_DIM (the columns of the outputs that
 * a block computes), OPTIONS (0), CLUSTER, CONSUMERS, KEYS, STAGES, Q_STAGES, CHUNK, V_ROWS (see forward_sm90_wide.h).
 */
#include "common/hopper.cuh"
#include "forward_sm90_wide.h"

static_assert(CLUSTER * VALUE_DIM == HEAD_DIM, "each block has its part of the columns");

/* Keys of a tile whose scores a block finds. */
#define FRAGMENT_KEYS 64
static_assert(CLUSTER * FRAGMENT_KEYS == KEYS, "each block has its part of the keys");
#include "common/fragment.cuh"

/* Of a thread, in registers. */
#define OUTPUTS (VALUE_DIM / 2)

#define STAGED 0 /* results do not go out by way of shared memory */

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_SM90_THREADS(CONSUMERS),
    QUERIES = FA_SM90_QUERIES(CONSUMERS),
    ROWS = 64,                /* queries of a consumer */
    K_BLOCKS = HEAD_DIM / 64, /* of 64 columns: the swizzle spans 128 bytes */
    V_BLOCKS = FA_SM90_ROW_BYTES(VALUE_DIM, ELEMENT) / 128,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries or weights */
    K_BLOCK = FRAGMENT_KEYS * 128,
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    P_BYTES = CLUSTER * Q_BLOCK, /* weights of a consumer: a block of columns of each block */
    K_CHUNK_BLOCKS = CHUNK / K_BLOCK,
    K_CHUNKS = (K_BLOCKS + K_CHUNK_BLOCKS - 1) / K_CHUNK_BLOCKS,
    V_CHUNKS = KEYS / V_ROWS,
    V_BLOCK = V_ROWS * 128,
    SLOTS = 2, /* pieces described ahead: one at a time, for there is no room for more */
    NO_PIECE = -1,
    NO_TASK = -2
};
static_assert(CHUNK % K_BLOCK == 0 && V_CHUNKS * V_ROWS == KEYS && V_BLOCKS * V_BLOCK <= CHUNK &&
                  V_BLOCK % 1024 == 0,
              "chunks are whole boxes, and fit");

/* Registers of a thread that loads and of one that computes. */
#define PRODUCER_REGISTERS 72
#define CONSUMER_REGISTERS 216
static_assert(WARPGROUP * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "a block has no more than it started with: it would wait for them for ever");

/* The block's number in its cluster, the other block, and the columns that are the block's. */
FA_DEVICE int this_block(void) { return (int)(blockIdx.x % CLUSTER); }
FA_DEVICE int peer_block(void) { return this_block() ^ 1; }
#define FIRST_COLUMN (this_block() * VALUE_DIM)

#include "forward_sm90/piece.cuh"

/* What the warps share. */
typedef struct shared_state {
    piece pieces[SLOTS];
    uint64_t piece_full[SLOTS], piece_empty[SLOTS];
    uint64_t q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t v_raw; /* for values that are cleaned before consumers may see them */
    /* What the peer's consumer of the same queries has sent; and whether both blocks are done with
     * the weights that are there. */
    uint64_t maxima_full[CONSUMERS], sums_full[CONSUMERS];
    uint64_t weights_full[CONSUMERS], weights_empty[CONSUMERS];
} shared_state;

/* Of rows, from the peer. */
typedef struct received {
    float maxima[CONSUMERS][ROWS], sums[CONSUMERS][ROWS];
} received;
static_assert(sizeof(received) == FA_SM90_WIDE_EXCHANGE(CONSUMERS), "they fit");

typedef struct pipeline {
    char *q, *ring, *weights; /* CONSUMERS tiles of q and of weights, STAGES chunks */
    received *from_peer;
    piece *pieces; /* SLOTS that are described ahead */
    shared_state *state;
} pipeline;

#include "forward_sm90/places.cuh"

#include "forward_sm90/pieces.cuh"

#include "forward_sm90/boxes.cuh"

#include "forward_sm90_wide/loads.cuh"

#include "forward_sm90/softmax.cuh"

#include "forward_sm90/scores.cuh"

#include "forward_sm90/results.cuh"

#include "forward_sm90_wide/exchange.cuh"

#include "forward_sm90_wide/products.cuh"

#include "forward_sm90_wide/consumer.cuh"

/* ---- The block ------------------------------------------------------------------------------- */

FA_DEVICE void init_barriers(shared_state *state)
{
    for (int c = 0; c < CONSUMERS; c++) {
        barrier_init(&state->q_full[0][c], 1);
        barrier_init(&state->q_empty[0][c], WARPS);
        barrier_init(&state->maxima_full[c], WARPS);
        barrier_init(&state->sums_full[c], WARPS);
        barrier_init(&state->weights_full[c], WARPS);
        barrier_init(&state->weights_empty[c], CLUSTER * WARPS);
    }
    for (int stage = 0; stage < STAGES; stage++) {
        barrier_init(&state->full[stage], 1);
        barrier_init(&state->empty[stage], CONSUMERS * WARPS);
    }
    barrier_init(&state->v_raw, 1);
    for (int slot = 0; slot < SLOTS; slot++) {
        barrier_init(&state->piece_full[slot], 1);
        barrier_init(&state->piece_empty[slot], CONSUMERS * WARPS + 2);
    }
    barrier_init_fence();
}

FA_KERNEL __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    forward_sm90_wide(const __grid_constant__ fa_attention_params p,
                      const __grid_constant__ fa_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state state;
    char *q = (char *)raw + (-shared_address(raw) & 1023), *ring = q + CONSUMERS * Q_BYTES;
    char *weights = ring + STAGES * CHUNK;
    const pipeline pipe = {.q = q,
                           .ring = ring,
                           .weights = weights,
                           .from_peer = (received *)(weights + CONSUMERS * P_BYTES),
                           .pieces = state.pieces,
                           .state = &state};
    if (threadIdx.x == 0) init_barriers(&state);
    cluster_sync(); /* the peer's barriers are there as well */
    if (threadIdx.x < WARPGROUP) {
        registers_give_back(PRODUCER_REGISTERS);
        if (threadIdx.x < 32) produce_chunks(&pipe, &p, &s);
        else if (threadIdx.x < 64) produce_queries(&pipe, &s);
        else if (threadIdx.x < 96) describe(&pipe, &p, &s);
    } else {
        registers_take(CONSUMER_REGISTERS);
        consume(&pipe, &p, same_for_warp(threadIdx.x / WARPGROUP - 1));
    }
    cluster_sync(); /* the peer may still send something here */
}
