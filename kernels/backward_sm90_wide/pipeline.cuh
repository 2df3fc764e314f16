/*
 * The state that the warps of a block share: buffers in dynamic shared memory, and the barriers by
 * which they are acquired and released. It replaces backward_sm90/pipeline.cuh.
 *
 *   barriers              buffers                         filled by              released by
 *   k_loaded, v_loaded    the block's keys, values        TMA, thread 0          -
 *   k_full, v_full        the same, without some rows     a load warp each       -
 *   peer_k_loaded         some columns of the peer's keys TMA, load warp 0       -
 *   q_full, q_empty       Q_STAGES tiles of queries       TMA, load warp 0       dV (scores), dK
 *                         and their rows
 *   dout_full, _empty     STAGES tiles of dout            TMA, load warp 1       dV, dK (dP)
 *   p_full, p_empty       a tile of weights               warpgroup dV           dK
 *   ds_full, ds_empty     DS_BUFFERS tiles of dS          warpgroup dK           dQ of both blocks
 *   ds_received           of them the peer's part         the peer's send warp   -
 *   turn_full, _empty     a turn to add dQ to sums        warp 3                 warpgroup dQ
 *
 * Those of persistent blocks:
 *
 *   k_empty               the keys of both blocks         -                      warpgroup dQ
 *   work_full, _empty     WORKS descriptions              load warp 0            all roles
 *   number_full, _empty   the next work tile's number     block 0                block 1
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_PIPELINE_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_PIPELINE_CUH

#ifdef FA_KERNELS_BACKWARD_SM90_PIPELINE_CUH
#error "include backward_sm90_wide/pipeline.cuh before the parts of backward_sm90"
#endif
#define FA_KERNELS_BACKWARD_SM90_PIPELINE_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

/* The state of a warp that loads. */
typedef struct load_state {
    uint64_t cleared;
    int32_t num_cleared; /* tiles of which it has cleared rows */
#if HIDES
    uint32_t blind[QUERIES / 32]; /* bits of queries of a tile that see no key */
#endif
} load_state;

#define LOADER(state) (&(state)->load[threadIdx.x / 32])

typedef struct shared_state {
    load_state load[LOAD_WARPS];
    uint64_t k_loaded, v_loaded, k_full, v_full;
    uint64_t q_full[Q_STAGES], q_empty[Q_STAGES], dout_full[STAGES], dout_empty[STAGES];
    uint64_t p_full, p_empty;
    uint64_t ds_full[DS_BUFFERS], ds_empty[DS_BUFFERS];
    uint64_t peer_k_loaded, ds_received[DS_BUFFERS];
#if TURNS_APART
    uint64_t turn_full, turn_empty; /* if sums have one order */
#endif
    block_work works[WORKS];
#if PERSISTENT
    uint64_t k_empty, work_full[WORKS], work_empty[WORKS];
    uint64_t number_full[WORKS], number_empty[WORKS];
#endif
#if DROPOUT_ALONE
    uint16_t kept[WARPGROUP]; /* what a thread has computed for the other warp of its pair */
#endif
#if HIDES
    uint16_t bad_keys[KEYS / 16]; /* bits of keys that are not finite; their rows are cleared */
#endif
} shared_state;
static_assert(STATIC_SMEM == 0 || sizeof(shared_state) <= STATIC_SMEM, "as the planner counts");

/* Where the buffers begin, in bytes from the end of the keys. */
enum {
    V_AT = BLOCKS * KEY_BLOCK,
    PEER_K_AT = V_AT + VALUE_BLOCKS * KEY_BLOCK,
    Q_AT = PEER_K_AT + PEER_BLOCKS * KEY_BLOCK,
    DOUT_AT = Q_AT + Q_STAGES * Q_BYTES,
    DS_AT = DOUT_AT + STAGES * DOUT_BYTES,
    P_AT = DS_AT + DS_BUFFERS * DS_BYTES,
    ROWS_AT = P_AT + WEIGHT_BYTES,
    NUMBERS_AT = ROWS_AT + Q_STAGES * ROW_BYTES
};
static_assert(WORKS * 4 <= 16, "as the planner counts");

typedef struct pipeline {
    char *buffers; /* where the keys begin: a multiple of 1024 */
    shared_state *state;
#if PERSISTENT
    const block_work *work; /* the work tile of a role at the moment */
#endif
} pipeline;

FA_DEVICE const block_work *work_of(const pipeline *pipe)
{
#if PERSISTENT
    return pipe->work;
#else
    return &pipe->state->works[0];
#endif
}

FA_DEVICE int q_stage(int count) { return (int)((uint32_t)count % Q_STAGES); }
FA_DEVICE int q_parity(int count) { return (int)((uint32_t)count / Q_STAGES & 1); }
FA_DEVICE int dout_stage(int count) { return (int)((uint32_t)count % STAGES); }
FA_DEVICE int dout_parity(int count) { return (int)((uint32_t)count / STAGES & 1); }

/* The same for dS. */
FA_DEVICE int ds_buffer(int count) { return (int)((uint32_t)count % DS_BUFFERS); }
FA_DEVICE int ds_parity(int count) { return (int)((uint32_t)count / DS_BUFFERS & 1); }

/* Named barriers. */
enum {
    NAMED_BARRIER_BLOCK, /* of __syncthreads */
    NAMED_BARRIER_DQ,    /* of that warpgroup */
    NAMED_BARRIER_DV,
    NAMED_BARRIER_DK
};

#if DROPOUT_ALONE

/* Of both pairs of warps that compute weights: they have stored bits for each other, or read them. */
enum { NAMED_BARRIER_KEPT = NAMED_BARRIER_DK + 1 };

#endif

FA_DEVICE void init_barriers(shared_state *state)
{
#if HIDES
    for (int i = 0; i < KEYS / 16; i++) state->bad_keys[i] = 0;
#endif
    for (int warp = 0; warp < LOAD_WARPS; warp++) {
        state->load[warp].num_cleared = 0;
        ptx_mbarrier_init(&state->load[warp].cleared, 1);
    }
    ptx_mbarrier_init(&state->k_loaded, 1);
    ptx_mbarrier_init(&state->v_loaded, 1);
    ptx_mbarrier_init(&state->k_full, 1);
    ptx_mbarrier_init(&state->v_full, 1);
    for (int stage = 0; stage < Q_STAGES; stage++) {
        ptx_mbarrier_init(&state->q_full[stage], 2); /* the rows, and queries */
        ptx_mbarrier_init(&state->q_empty[stage], 2 * WARPS);
    }
    for (int stage = 0; stage < STAGES; stage++) {
        ptx_mbarrier_init(&state->dout_full[stage], 1);
        ptx_mbarrier_init(&state->dout_empty[stage], 2 * WARPS);
    }
    ptx_mbarrier_init(&state->p_full, WARPGROUP);
    ptx_mbarrier_init(&state->p_empty, WARPGROUP);
    for (int i = 0; i < DS_BUFFERS; i++) {
        ptx_mbarrier_init(&state->ds_full[i], WARPGROUP);
        ptx_mbarrier_init(&state->ds_empty[i], CLUSTER * WARPS);
        ptx_mbarrier_init(&state->ds_received[i], 1);
    }
    ptx_mbarrier_init(&state->peer_k_loaded, 1);
#if TURNS_APART
    ptx_mbarrier_init(&state->turn_full, 1);
    ptx_mbarrier_init(&state->turn_empty, WARPGROUP);
#endif
#if PERSISTENT
    ptx_mbarrier_init(&state->k_empty, WARPS);
    for (int i = 0; i < WORKS; i++) {
        ptx_mbarrier_init(&state->work_full[i], 1);
        ptx_mbarrier_init(&state->work_empty[i],
                          3 * WARPS + 3); /* and the other warps of the first */
        ptx_mbarrier_init(&state->number_full[i], 1);
        ptx_mbarrier_init(&state->number_empty[i], 1);
    }
#endif
    ptx_mbarrier_init_fence();
}

/* ---- Work tiles ------------------------------------------------------------------------------ */

FA_DEVICE int work_parity(int number) { return number / WORKS & 1; }

/* A role acquires the block's work tile `number` when it has been described; false at the end. A block
 * that is not persistent has one. */
FA_DEVICE bool acquire_work_tile(pipeline *own, int number)
{
#if PERSISTENT
    const block_work *w =
        (const block_work *)ptx_uniform_pointer(&own->state->works[number % WORKS]);
    ptx_mbarrier_wait(&own->state->work_full[number % WORKS], work_parity(number));
    own->work = w;
    /* The same for all lanes, as the assembler must know: where lanes may part it computes the products'
     * descriptors again for each product, which then waits. */
    return ptx_uniform(w->ends) == 0;
#else
    (void)own;
    return number == 0;
#endif
}

/* A warp no longer needs the description. leader: the lane that arrives. */
FA_DEVICE void release_work_tile(const pipeline *own, int number, int leader)
{
#if PERSISTENT
    ptx_mbarrier_arrive_if(&own->state->work_empty[number % WORKS], leader);
#else
    (void)own, (void)number, (void)leader;
#endif
}

#endif
