/*
 * The state that the warps of a block share: buffers in dynamic shared memory, and the barriers by
 * which they are acquired and released.
 *
 *   barriers              buffers                         filled by              released by
 *   k_loaded, v_loaded    the block's keys, values        TMA, thread 0          -
 *   k_full, v_full        the same, without some rows     load warp              -
 *   q_full, q_empty       STAGES tiles of queries         TMA, load warp         both consumers
 *   dout_full, _empty     STAGES tiles of dout, and rows  TMA, load warp         both consumers
 *                         (ROWS_WITH_Q: with queries)
 *   dq_full, dq_empty     a consumer's columns of dQ      the consumer           TMA, a store warp
 *                         (GIVES_ROOM: dq_empty also says that a sum of dQ has been loaded there)
 *   work_full, _empty     WORKS descriptions of work      scheduler warp         all other roles
 *   work_loaded           most of a work tile's loads     load warp              -
 *   k_empty, v_empty      the next keys, values           both consumers         load warp
 *   bias_full, _empty     a consumer's half of a bias     TMA, bias warp         the consumer
 *   left                  all of dS, in the workspace     store warps, and       -
 *                         consumers that are done
 *   share_full, _empty    dS that blocks have left        load warp              consumers
 *   dq_received           sums of dQ, in the buffer of dQ the block before       -
 *   dq_room               room for sums, in the next block  its store warp       -
 *   dq_loaded             a sum of dQ, in the buffer of dQ  TMA, a store warp    -
 *   rows_full             the first slots of rows         all blocks             -
 *
 * The DS_BUFFERS tiles of dS need no mbarriers: consumers take turns (NAMED_BARRIER_ISSUE), and
 * what is stored before a turn is read after it. If there are two buffers, consumer 0 stores dS
 * while consumer 1 may still read the buffer, so it waits (NAMED_BARRIER_DS). Consumer 1 gets its
 * turn from consumer 0, which has read the buffer by then.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_PIPELINE_CUH
#define FA_KERNELS_BACKWARD_SM90_PIPELINE_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/work.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

/* Static shared memory of a chain, or with dropout at head dim 128, is a multiple of 512 bytes. So the dynamic one, which follows it,
 * begins there, and less room is needed to align the buffers (FA_BACKWARD_SM90_PADDING). */
#if CHAINED || (DROPOUT_ALONE && HEAD_DIM == 128)
#define STATE_ALIGNMENT 512
#else
#define STATE_ALIGNMENT 8
#endif

/* Where the buffers begin, in bytes from the end of the keys. */
enum {
    V_AT = KEY_BYTES,
    Q_AT = V_AT + VALUE_BYTES,
    DOUT_AT = Q_AT + STAGES * Q_BYTES,
    DS_AT = DOUT_AT + STAGES * DOUT_BYTES,
    DQ_AT = DS_AT + DS_BUFFERS * DS_BYTES,
    BIAS_AT = DQ_AT + DQ_BUFFERS * CONSUMERS * DQ_PART,
    ROWS_AT = BIAS_AT + BIAS_BYTES
};

#if BIAS_TILE

/* When all buffers are free, they become slots for dS that blocks have left (dbias_sums.cuh). */
enum { SHARE_SLOTS = ROWS_AT / DS_BYTES };

FA_DEVICE int share_slot(int number) { return (int)((uint32_t)number % SHARE_SLOTS); }
FA_DEVICE int share_parity(int number) { return (int)((uint32_t)number / SHARE_SLOTS & 1); }

#endif

typedef struct shared_state {
#ifdef __cplusplus
    alignas(STATE_ALIGNMENT)
#else
    _Alignas(STATE_ALIGNMENT)
#endif
        uint64_t k_loaded;
    uint64_t v_loaded, k_full, v_full, cleared;
    uint64_t q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
    uint64_t dq_full[DQ_BARRIERS][CONSUMERS], dq_empty[DQ_BUFFERS][CONSUMERS];
    int32_t num_cleared; /* tiles of which the load warp has cleared rows */
    block_work works[WORKS];
#if PERSISTENT
    uint64_t work_full[WORKS], work_empty[WORKS], work_loaded[WORKS], k_empty, v_empty;
#endif
#if BIAS_TILE
    uint64_t bias_full[CONSUMERS], bias_empty[CONSUMERS];
    uint64_t left;  /* all of dS has been left, and all buffers are free */
    bool adds_left; /* this block is the last of its unit (dbias_sums.cuh) */
    uint64_t share_full[SHARE_SLOTS], share_empty[SHARE_SLOTS];
#endif
#if CHAINED
    uint64_t dq_received[DQ_BUFFERS][CONSUMERS], dq_room[DQ_BUFFERS][CONSUMERS];
    uint64_t rows_full;
#endif
#if ROUNDING && !GIVES_ROOM
    uint64_t dq_loaded[CONSUMERS];
#endif
#if DROPOUT_ALONE
    /* What a thread has computed for the other warp of its pair (dropout.cuh). */
    uint16_t kept[CONSUMERS][WARPGROUP];
#endif
#if HIDES
    uint16_t bad_keys[KEYS / 16]; /* bits of keys that are not finite; their rows are cleared */
    uint32_t blind[QUERIES / 32]; /* the load warp's: bits of queries of a tile that see no key */
#endif
} shared_state;
static_assert(STATIC_SMEM == 0 || sizeof(shared_state) <= STATIC_SMEM, "as the planner counts");

typedef struct pipeline {
    char *buffers; /* where the keys begin: a multiple of 1024 */
    shared_state *state;
#if BIAS_TILE
    bool bias_mapped; /* as in fa_backward_sm90_params */
    int dbias_mapped;
#endif
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

#if BIAS_TILE

/* Whether TMA loads the bias. */
FA_DEVICE bool has_bias_map(const pipeline *pipe) { return BIAS_ALONE || pipe->bias_mapped; }

#endif

/* Whether dbias is stored from dS in 32 bits, through the buffer of dQ, which is then used twice a
 * tile. */
FA_DEVICE bool shares_dbias(const pipeline *pipe)
{
#if BIAS_TILE
    return pipe->dbias_mapped >= FA_BACKWARD_SM90_DBIAS_STORED_FLOATS;
#else
    (void)pipe;
    return false;
#endif
}

/* Whether dS is left in the workspace. */
FA_DEVICE bool leaves_ds(const pipeline *pipe)
{
#if BIAS_TILE
    return pipe->dbias_mapped == FA_BACKWARD_SM90_DBIAS_LEFT;
#else
    (void)pipe;
    return false;
#endif
}

FA_DEVICE int stage_of(int count) { return (int)((uint32_t)count % STAGES); }

/* The slot of a tile's rows. There are at least as many as stages, so it is free when the tile's stage is. */
FA_DEVICE int slot_of(int count) { return (int)((uint32_t)count % ROW_SLOTS); }
FA_DEVICE int parity_of(int count) { return (int)((uint32_t)count / STAGES & 1); }

/* A consumer uses its buffers of dQ in turn; uses are numbered from 0. The offset in bytes of a
 * use's buffer from the consumer's first one. */
FA_DEVICE int dq_buffer(int use) { return (int)((uint32_t)use % DQ_BUFFERS) * CONSUMERS * DQ_PART; }

/* The barrier by which a consumer acquires the buffer of a use. At first a buffer is free, unless store warps say so
 * (GIVES_ROOM). */
FA_DEVICE uint64_t *dq_empty(shared_state *state, int consumer, int use)
{
    return &state->dq_empty[(uint32_t)use % DQ_BUFFERS][consumer];
}

/* The barrier at which a consumer arrives when it has filled the buffer of a use. Each buffer has a
 * barrier. If several store warps serve a consumer in turn, each of them has one for each part of dQ,
 * so that no barrier is a phase ahead of a warp that waits. */
FA_DEVICE uint64_t *dq_full(shared_state *state, int consumer, int use)
{
    return &state->dq_full[(uint32_t)use % DQ_BARRIERS][consumer];
}

#if CHAINED

/* The barriers of a buffer's use by sums that come from another block, and their parity. Use 0 has
 * none. */
FA_DEVICE uint64_t *dq_received(shared_state *state, int consumer, int use)
{
    return &state->dq_received[(uint32_t)use % DQ_BUFFERS][consumer];
}

FA_DEVICE uint64_t *dq_room(shared_state *state, int consumer, int use)
{
    return &state->dq_room[(uint32_t)use % DQ_BUFFERS][consumer];
}

FA_DEVICE int chain_parity(int use) { return (int)((uint32_t)(use - 1) / DQ_BUFFERS & 1); }

#endif

FA_DEVICE int dq_full_parity(int use) { return (int)((uint32_t)use / DQ_BARRIERS & 1); }

FA_DEVICE int ds_buffer(int count) { return (int)((uint32_t)count % DS_BUFFERS); }

/* Named barriers. */
enum {
    NAMED_BARRIER_BLOCK, /* of __syncthreads */
    /* Of consumer 0, then of consumer 1: where it waits until it may issue products. */
    NAMED_BARRIER_ISSUE,
    NAMED_BARRIER_DS =
        NAMED_BARRIER_ISSUE + CONSUMERS, /* where consumer 0 waits until dS has been read */
    NAMED_BARRIER_CONSUMERS,
    NAMED_BARRIER_BEGIN, /* where consumer 1 waits until consumer 0 has begun the same work tile */
    /* Of consumer 0, then of consumer 1: its warps have read the sums in its buffer. */
    NAMED_BARRIER_CHAIN
};

#if DROPOUT_ALONE

/* Of both pairs of warps of consumer 0, then of consumer 1: they have stored bits for each other. */
enum { NAMED_BARRIER_KEPT = NAMED_BARRIER_CHAIN + CONSUMERS };

#endif

FA_DEVICE void init_barriers(shared_state *state)
{
#if HIDES
    for (int i = 0; i < KEYS / 16; i++) state->bad_keys[i] = 0;
#endif
    state->num_cleared = 0;
#if BIAS_TILE
    state->adds_left = false;
    ptx_mbarrier_init(&state->left, STORE_WARPS + CONSUMERS * WARPS);
    for (int slot = 0; slot < SHARE_SLOTS; slot++) {
        ptx_mbarrier_init(&state->share_full[slot], 1);
        ptx_mbarrier_init(&state->share_empty[slot], CONSUMERS * WARPS);
    }
#endif
    ptx_mbarrier_init(&state->k_loaded, 1);
    ptx_mbarrier_init(&state->v_loaded, 1);
    ptx_mbarrier_init(&state->k_full, 1);
    ptx_mbarrier_init(&state->v_full, 1);
    ptx_mbarrier_init(&state->cleared, 1);
    for (int stage = 0; stage < STAGES; stage++) {
        ptx_mbarrier_init(&state->q_full[stage], ROWS_WITH_Q ? 2 : 1);
        ptx_mbarrier_init(&state->q_empty[stage], CONSUMERS * WARPS);
        ptx_mbarrier_init(&state->dout_full[stage], ROWS_WITH_Q ? 1 : 2); /* the rows, and dout */
        ptx_mbarrier_init(&state->dout_empty[stage], CONSUMERS * WARPS);
    }
    for (int i = 0; i < CONSUMERS; i++) {
        for (int n = 0; n < DQ_BARRIERS; n++) ptx_mbarrier_init(&state->dq_full[n][i], WARPGROUP);
        for (int n = 0; n < DQ_BUFFERS; n++) ptx_mbarrier_init(&state->dq_empty[n][i], 1);
#if BIAS_TILE
        ptx_mbarrier_init(&state->bias_full[i], 1);
        ptx_mbarrier_init(&state->bias_empty[i], WARPS);
#endif
    }
#if CHAINED
    ptx_mbarrier_init(&state->rows_full, 1);
    for (int i = 0; i < CONSUMERS; i++)
        for (int n = 0; n < DQ_BUFFERS; n++) {
            ptx_mbarrier_init(&state->dq_received[n][i], 1);
            ptx_mbarrier_init(&state->dq_room[n][i], 1);
        }
#endif
#if ROUNDING && !GIVES_ROOM
    for (int i = 0; i < CONSUMERS; i++) ptx_mbarrier_init(&state->dq_loaded[i], 1);
#endif
#if PERSISTENT
    for (int i = 0; i < WORKS; i++) {
        ptx_mbarrier_init(&state->work_full[i], 1);
        ptx_mbarrier_init(&state->work_loaded[i], 1);
        ptx_mbarrier_init(&state->work_empty[i], CONSUMERS * WARPS + STORE_WARPS + 1);
    }
    ptx_mbarrier_init(&state->k_empty, CONSUMERS * WARPS);
    ptx_mbarrier_init(&state->v_empty, CONSUMERS * WARPS);
#endif
    ptx_mbarrier_init_fence();
}

#if PERSISTENT

/* ---- Work tiles of a persistent block -------------------------------------------------------- */

FA_DEVICE int work_parity(int number) { return number / WORKS & 1; }

/* A role acquires work tile `number` when it has been described; false at the end. */
FA_DEVICE bool acquire_work_tile(pipeline *own, int number)
{
    const block_work *w =
        (const block_work *)ptx_uniform_pointer(&own->state->works[number % WORKS]);
    ptx_mbarrier_wait(&own->state->work_full[number % WORKS], work_parity(number));
    own->work = w;
    return !w->ends;
}

/* A warp no longer needs the description. leader: the lane that arrives. */
FA_DEVICE void release_work_tile(const pipeline *own, int number, int leader)
{
    ptx_mbarrier_arrive_if(&own->state->work_empty[number % WORKS], leader);
}

#endif

#endif
