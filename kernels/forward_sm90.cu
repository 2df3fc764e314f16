/*
 * Attention forward on Hopper's tensor cores: float16 and bfloat16, float32 sums.
 *
 * One block a multiprocessor stays and takes piece after piece of the work: QUERIES queries of a
 * head and the tiles of keys that they see. Of its first warpgroup one warp loads queries and keys,
 * one values (forward_sm90/loads.cuh), by the copy engine (TMA) into STAGES places each; the third
 * describes the pieces ahead, the fourth finds out which of the last ones are the block's
 * (pieces.cuh). The others, the consumers (consumer.cuh), have 64 queries each: they ask for their
 * products (products.cuh), and do their softmax (scores.cuh, softmax.cuh) while these run. They
 * take turns at asking, so that the tensor cores work for one while another is in its softmax
 * (FlashAttention-3, section 3.1, arXiv:2407.08608). results.cuh writes what comes out.
 *
 * Compiled with the numbers of a row of kernels/variants.h: ELEMENT, HEAD_DIM, VALUE_DIM, OPTIONS, CLUSTER (1),
 * CONSUMERS, KEYS, STAGES, Q_STAGES, SINGLE_TILES (see forward_sm90.h).
 */
#include "common/hopper.cuh"
#include "forward_sm90.h"

#define FIRST_COLUMN 0 /* of the results that a block computes */

#define FRAGMENT_KEYS KEYS
#include "common/fragment.cuh"

/* Whether an option hides values that products see all the same. */
#define HIDES_VALUES (OPTIONS & (FA_SM90_BIAS | FA_SM90_BY_ROWS))

/* Whether the bias of a tile is fetched before its scores are asked for; and plain tiles have maxima, too. */
#define BIAS_AHEAD (OPTIONS == FA_SM90_BIAS)
#define MAXIMA_EVERYWHERE BIAS_AHEAD

/* Whether warpgroups choose between plain tiles with maxima and without (softmax.cuh). */
#define ADAPTS (!MAXIMA_EVERYWHERE && !SINGLE_TILES)

/* Whether blocks can draw their pieces from a counter. Rows are done again by what is the block's; and head dim 64
 * with three consumers, which is for long rows, has no register to spare. */
#define DRAWS (!HIDES_VALUES && !(CONSUMERS == 3 && HEAD_DIM <= 64))

/* Of a thread, in registers. */
#define OUTPUTS (VALUE_DIM / 2)

/* Results go out by way of shared memory. */
#define STAGED (FA_SM90_STAGING(HEAD_DIM, CONSUMERS) > 0 && VALUE_DIM % 64 == 0)

enum {
    WARPGROUP = 128,
    WARPS = WARPGROUP / 32,
    THREADS = FA_SM90_THREADS(CONSUMERS),
    QUERIES = FA_SM90_QUERIES(CONSUMERS),
    ROWS = 64, /* queries of a consumer */
    K_BLOCKS =
        FA_SM90_ROW_BYTES(HEAD_DIM, ELEMENT) / 128, /* of 64 columns: the swizzle spans 128 bytes */
    V_BLOCKS = FA_SM90_ROW_BYTES(VALUE_DIM, ELEMENT) / 128,
    Q_BLOCK = ROWS * 128, /* bytes of one block of columns of a consumer's queries */
    KV_BLOCK = KEYS * 128,
    Q_BYTES = K_BLOCKS * Q_BLOCK,
    K_BYTES = K_BLOCKS * KV_BLOCK,
    V_BYTES = V_BLOCKS * KV_BLOCK,
    BIAS_BLOCK = ROWS * 128, /* 64 columns of the bias of a consumer's tile */
    BIAS_BYTES = KEYS / 64 * BIAS_BLOCK,
    SLOTS = FA_SM90_SLOTS(HEAD_DIM, VALUE_DIM),
    NO_PIECE = -1,
    NO_TASK = -2
};

/* Registers of a thread that loads and of one that computes. */
#if CONSUMERS == 3
#define PRODUCER_REGISTERS 32
#define CONSUMER_REGISTERS 160
#else
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#endif

/* Whether a piece begins before the one before it ends: see consumer.cuh. */
#define OVERLAPS (HEAD_DIM <= 64 && Q_STAGES > 1)

#include "forward_sm90/piece.cuh"

/* What the warps share. */
typedef struct shared_state {
    uint64_t piece_full[SLOTS], piece_empty[SLOTS];
    uint64_t q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
    uint64_t k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    uint64_t v_raw; /* for values that are cleaned before consumers may see them */
    int32_t dealt[FA_SM90_MOST_DEALT], dealt_count;
    uint64_t dealt_full;
    uint32_t moved[CONSUMERS]
                  [2]; /* counts of tiles in which a consumer's bases moved: consumer.cuh */
#if OPTIONS & FA_SM90_BIAS
    uint64_t bias_full[CONSUMERS], bias_empty[CONSUMERS];
#endif
} shared_state;

typedef struct pipeline {
    char *q, *k, *v; /* Q_STAGES times CONSUMERS tiles of q, STAGES tiles of k and of v */
    uint32_t k_matrix, v_matrix; /* the first ones, as wgmma finds them */
    char *staging;               /* ROWS rows of 128 bytes for each consumer, if there is room */
#if OPTIONS & FA_SM90_BIAS
    char *bias; /* a tile of it for each consumer */
#endif
    piece *pieces; /* SLOTS that are described ahead */
    shared_state *state;
} pipeline;
static_assert(sizeof(piece) <= FA_SM90_SLOT, "as the planner counts shared memory");

#include "forward_sm90/places.cuh"

#include "forward_sm90/pieces.cuh"

#include "forward_sm90/boxes.cuh"

#include "forward_sm90/loads.cuh"

#include "forward_sm90/softmax.cuh"

#include "forward_sm90/scores.cuh"

#include "forward_sm90/products.cuh"

#include "forward_sm90/results.cuh"

#include "forward_sm90/consumer.cuh"
#if HIDES_VALUES
#include "forward_sm90/redo.cuh"
#endif

/* ---- The block ------------------------------------------------------------------------------- */

/* loaders: warps that read pieces, besides the consumers'. */
FA_DEVICE void init_barriers(shared_state *state, int loaders)
{
    for (int i = 0; i < Q_STAGES * CONSUMERS; i++) {
        barrier_init(&state->q_full[0][i], 1);
        barrier_init(&state->q_empty[0][i], WARPS);
    }
    for (int i = 0; i < CONSUMERS * 2; i++) state->moved[0][i] = UINT32_MAX / 2;
    for (int stage = 0; stage < STAGES; stage++) {
        barrier_init(&state->k_full[stage], 1);
        barrier_init(&state->v_full[stage], 1);
        barrier_init(&state->k_empty[stage], CONSUMERS * WARPS);
        barrier_init(&state->v_empty[stage], CONSUMERS * WARPS);
    }
    barrier_init(&state->v_raw, 1);
    barrier_init(&state->dealt_full, 1);
    for (int slot = 0; slot < SLOTS; slot++) {
        barrier_init(&state->piece_full[slot], 1);
        barrier_init(&state->piece_empty[slot], CONSUMERS * WARPS + loaders);
    }
#if OPTIONS & FA_SM90_BIAS
    for (int c = 0; c < CONSUMERS; c++) {
        barrier_init(&state->bias_full[c], 1);
        barrier_init(&state->bias_empty[c], WARPS);
    }
#endif
    barrier_init_fence();
}

FA_DEVICE int count_loaders(const fa_sm90_params *s)
{
    return OPTIONS & FA_SM90_BIAS && s->bias_mapped ? 3 : 2;
}

FA_KERNEL __launch_bounds__(THREADS, 1) forward_sm90(const __grid_constant__ fa_attention_params p,
                                                     const __grid_constant__ fa_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state shared;
    shared_state *state = (shared_state *)kept_place(&shared);
    char *q = (char *)raw + (-shared_address(raw) & 1023), *k = q + Q_STAGES * CONSUMERS * Q_BYTES;
    char *v = k + STAGES * K_BYTES, *staging = v + STAGES * V_BYTES;
    char *behind = staging + FA_SM90_STAGING(HEAD_DIM, CONSUMERS);
    const pipeline pipe = {
        .q = q,
        .k = k,
        .v = v,
        .k_matrix = kept(matrix_place(k, 0)),
        .v_matrix = kept(matrix_place(v, KV_BLOCK)),
        .staging = (char *)kept_place(staging),
#if OPTIONS & FA_SM90_BIAS
        .bias = behind,
        .pieces = (piece *)kept_place(behind + CONSUMERS * BIAS_BYTES),
#else
        .pieces = (piece *)kept_place(behind),
#endif
        .state = state
    };
    if (threadIdx.x == 0) init_barriers(state, count_loaders(&s));
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_give_back(PRODUCER_REGISTERS);
        if (threadIdx.x < 32) produce_keys(&pipe, &p, &s);
        else if (threadIdx.x < 64) produce_values(&pipe, &p, &s);
        else if (threadIdx.x < 96) describe(&pipe, &p, &s);
        else if (s.mixed && s.tasks) deal_out(&pipe, &p, &s);
#if OPTIONS & FA_SM90_BIAS
        else if (s.bias_mapped) produce_biases(&pipe, &s);
#endif
    } else {
        registers_take(CONSUMER_REGISTERS);
        const int consumer = same_for_warp(threadIdx.x / WARPGROUP - 1);
        const bool broken = consume(&pipe, &p, consumer);
#if HIDES_VALUES
        if (broken) redo_rows(&pipe, &p, &s, consumer);
#else
        (void)broken;
#endif
    }
}
