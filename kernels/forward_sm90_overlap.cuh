/*
 * The consumer of forward_sm90 with OVERLAP: a warpgroup's own softmax runs while its product P V of the
 * tile before still does. It goes round
 *
 *     ask for S = Q K^T of tile t + 1 and for out += P V of tile t, wait for S, softmax of it in place,
 *     wait for P V, round the weights into P
 *
 * (FlashAttention-3, section 3.2, arXiv:2407.08608, within a warpgroup). Weights take the place of the
 * scores, for P is read until P V has ended; so if they turn out too large for their bases (softmax without
 * maxima, see forward_sm90.cu), the warp multiplies its queries and keys once more. The keys are given back
 * when that is known.
 */
#ifndef FA_KERNELS_FORWARD_SM90_OVERLAP_CUH
#define FA_KERNELS_FORWARD_SM90_OVERLAP_CUH

/* A warp's own products, by mma.sync: accumulators lie as wgmma's do. */
#define ARCH 80
#include "common/ampere.cuh"

/* ---- Softmax in place -------------------------------------------------------------------------- */

/* Scores become weights; and their sums, of the thread's columns. Pair i is columns 8 (i / 2) + {0, 1} of
 * row i % 2. Returns whether some weight of the warp is, or may be, too large. */
FA_DEVICE bool weigh(float *s, const row_state *rows, const units *u, float *sum)
{
    const float scale = u->scale;
    const float base[2] = {rows->base[0] + u->shift[0], rows->base[1] + u->shift[1]};
    uint32_t seen = 0;
    float part[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const float a = exp2_fast(fmaf(s[2 * i], scale, -base[i % 2]));
        const float b = exp2_fast(fmaf(s[2 * i + 1], scale, -base[i % 2]));
        s[2 * i] = a;
        s[2 * i + 1] = b;
        if (SUMS) seen |= __float_as_uint(a) | __float_as_uint(b);
        else part[i % 2][i / 2 % 2] += a + b;
    }
    sum[0] = part[0][0] + part[0][1];
    sum[1] = part[1][0] + part[1][1];
    const bool large = SUMS ? (seen & TWO_BIT) != 0 : !(sum[0] <= SUM_BOUND && sum[1] <= SUM_BOUND);
    return __any_sync(0xffffffff, large);
}

FA_DEVICE void add_sums(row_state *rows, const float *sum)
{
    rows->sum[0] += sum[0];
    rows->sum[1] += sum[1];
}

/* An A operand of wgmma. */
FA_DEVICE void round_weights(uint32_t *weights, const float *s)
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) weights[i] = pack_pair(s[2 * i], s[2 * i + 1]);
}

#if GENERAL

/* ---- Options that change scores ---------------------------------------------------------------- */

/* tanh by the special-function unit is right to 11 bits: enough for weights of 16 bits, not for a
 * log-sum-exp. */
FA_DEVICE void cap_scores(const fa_attention_params *p, float *s, float inner)
{
    if (p->lse) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] = fa_tanh_fast(s[i] * inner);
        return;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = tanh_approximate(s[i] * inner);
}

/* Subtracts slope times the distance from query to key. Left of the diagonal, where all of the warp's
 * rows mostly are, that is linear in the key: what depends on the row alone is shifted. */
FA_DEVICE void subtract_alibi(float *s, int r, const fa_fragment_row *row, float unit, units *u)
{
    const float slope = row->logit.slope * unit, distance = (float)(row->logit.center - row->j);
    if (__any_sync(0xffffffff, distance < KEYS)) {
        fa_add_alibi(s, r, row, unit);
        return;
    }
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            s[4 * j + 2 * r + c] = fmaf(slope, (float)(8 * j + c), s[4 * j + 2 * r + c]);
    u->shift[r] = slope * distance * u->scale;
}

/* The bias of the tile as the copy engine has laid it down: 64 rows, swizzled. */
FA_DEVICE void add_staged_bias(const char *bias, float *s, float unit, int dtype)
{
    const int group = (int)threadIdx.x % 32 / 4;
    const int first = (int)threadIdx.x % WARPGROUP / 32 * 16 + group;
    bias += first * 128 + (int)threadIdx.x % 4 * 4;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = j / 8 * BIAS_BLOCK + r * 8 * 128 + (j % 8 ^ group) * 16;
            const float2 b = fa_float_pair(*(const uint32_t *)(bias + at), dtype);
            float *x = s + 4 * j + 2 * r;
            x[0] = fmaf(b.x, unit, x[0]);
            x[1] = fmaf(b.y, unit, x[1]);
        }
}

FA_DEVICE void take_staged_bias(const pipeline *pipe, const fa_attention_params *p,
                                const progress *at, float *s, float unit, int consumer)
{
    const char *bias = pipe->bias + consumer * BIAS_BYTES;
    barrier_wait(&pipe->state->bias_full[consumer], at->biases & 1);
    if (p->bias.dtype == FA_KERNEL_BFLOAT16) add_staged_bias(bias, s, unit, FA_KERNEL_BFLOAT16);
    else add_staged_bias(bias, s, unit, FA_KERNEL_FLOAT16);
}

/* Rows of the options that are read or computed by rows. */
FA_DEVICE void change_rows(const pipeline *pipe, const fa_attention_params *p, const progress *at,
                           float *s, units *u, float unit, bool read_bias, int consumer)
{
    const int column = at->tile * KEYS + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const fa_fragment_row row = row_at(p, find_slot(pipe, at->number), consumer, r, column);
        if (p->alibi_slopes) subtract_alibi(s, r, &row, unit, u);
        if (read_bias) fa_add_bias(&p->bias, s, r, &row, unit);
        if (p->mask.data) fa_apply_mask(&p->mask, s, r, &row);
    }
}

/* Scores become what the softmax takes, in its units. */
FA_DEVICE void change_scores(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *sm90, const progress *at, const place *here,
                             float *s, units *u, int consumer)
{
    const float unit = FA_LOG2E / here->scale;
    const bool staged = sm90->bias_mapped, read = p->bias.data && !staged;
    if (p->softcap > 0.0f) cap_scores(p, s, here->inner);
    else if (here->inner != 1.0f) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] *= here->inner;
    }
    if (staged) take_staged_bias(pipe, p, at, s, unit, consumer);
    if (p->alibi_slopes || p->mask.data || read)
        change_rows(pipe, p, at, s, u, unit, read, consumer);
}

#endif

/* Scores as the softmax takes them. */
FA_DEVICE units finish_scores(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *sm90, const progress *at, const place *here,
                              float *s, int consumer)
{
    const int key = at->tile * KEYS;
    units u = {here->scale, {0, 0}};
#if GENERAL
    change_scores(pipe, p, sm90, at, here, s, &u, consumer);
#endif
    if (key < here->full_lo || key + KEYS > here->full_hi)
        mask_scores(s, find_slot(pipe, at->number), consumer, key);
    return u;
}

/* What has to follow when the values of the tile before have been added. */
enum { RESCALE = 1, RENEW = 2 };

FA_DEVICE int softmax(float *s, row_state *rows, float *rescale, const units *u, bool first)
{
    float sum[2];
    int next = 0;
    if (rows->unseen) {
        move_bases(s, rows, rescale, u);
        next = first ? 0 : RESCALE;
    }
    if (weigh(s, rows, u, sum)) return next | RENEW;
    add_sums(rows, sum);
    return next;
}

/* ---- Products ---------------------------------------------------------------------------------- */

/* Asks for scores of this tile, if anybody needs them, and, if there are weights, for values of the one
 * before; returns when the scores are there. */
FA_DEVICE void ask(float *out, float *s, const uint32_t *weights, uint32_t q, uint32_t k,
                   uint32_t v, bool weighed, bool needed, int add, int consumer)
{
    REGISTER_FENCE(out, OUTPUTS);
    REGISTER_FENCE(s, KEYS / 2);
    if (weighed) {
        wgmma_fence();
        multiply_qk(s, q, k);
        multiply_pv(out, weights, v, add);
        pass_turn(consumer);
        wgmma_wait(1);
    } else if (needed) {
        wgmma_fence();
        multiply_qk(s, q, k);
        pass_turn(consumer);
        wgmma_wait(0);
    } else pass_turn(consumer);
    REGISTER_FENCE(s, KEYS / 2);
}

/* The product with values has ended: until here it read the weights. The extra wait binds the softmax
 * to the time before: the assembler would put its exponentials behind, but it cannot decide a branch
 * without them. */
FA_DEVICE void await_values(float *out, uint32_t *weights, int next)
{
    if (next & RENEW) wgmma_wait(0);
    wgmma_wait(0);
    REGISTER_FENCE(out, OUTPUTS);
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) asm volatile("" : "+r"(weights[i])::"memory");
}

/* Where 16 bytes of a swizzled row lie: columns 8 x piece_of_8 and the seven behind. block: bytes from one
 * block of 64 columns to the next. */
FA_DEVICE uint32_t swizzled(uint32_t matrix, int block, int row, int piece_of_8)
{
    return matrix + piece_of_8 / 8 * block + row * 128 + ((piece_of_8 ^ row) % 8) * 16;
}

/* The warp's rows of S = Q K^T. */
FA_DEVICE void multiply_again(const pipeline *pipe, tile_count count, float *s, int consumer)
{
    const int lane = (int)threadIdx.x % 32,
              row = (int)threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    const uint32_t q = shared_address(pipe->q + consumer * Q_BYTES);
    const uint32_t k = shared_address(pipe->k + stage_of(count) * K_BYTES);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = 0;
#pragma unroll 1
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        uint32_t a[4], b[4];
        fa_load_matrices(a, swizzled(q, Q_BLOCK, row, 2 * step + lane / 16));
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
            const int key = 16 * j + lane / 16 * 8 + lane % 8;
            fa_load_matrices(b, swizzled(k, KV_BLOCK, key, 2 * step + lane / 8 % 2));
            fa_mma(s + 8 * j, a, b[0], b[1]);
            fa_mma(s + 8 * j + 4, a, b[2], b[3]);
        }
    }
}

/* The softmax with bases that fit. */
FA_DEVICE void renew(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *sm90,
                     const progress *at, const place *here, float *s, row_state *rows,
                     float *rescale, int consumer)
{
    float sum[2];
    multiply_again(pipe, at->count, s, consumer);
    const units u = finish_scores(pipe, p, sm90, at, here, s, consumer);
    move_bases(s, rows, rescale, &u);
    (void)weigh(s, rows, &u, sum); /* rows of NaN are always too large */
    add_sums(rows, sum);
}

/* ---- The walk ---------------------------------------------------------------------------------- */

/* What a tile was made of is given back when its weights are final. */
FA_DEVICE void release_tile(const pipeline *pipe, const fa_sm90_params *sm90, progress *at,
                            int consumer)
{
    release(&pipe->state->k_empty[stage_of(at->count)]);
    if (at->tile + 1 == at->tiles) release(&pipe->state->q_empty[consumer]);
#if BIAS_STAGED
    if (!sm90->bias_mapped || !is_needed(at)) return;
    release(&pipe->state->bias_empty[consumer]);
    at->biases++;
#endif
}

/* Behind the last piece there is one more round, for the values of its last tile. Returns whether rows have
 * to be done once more. */
FA_DEVICE bool consume(const pipeline *pipe, const fa_attention_params *p,
                       const fa_sm90_params *sm90, int consumer)
{
    bool broken = false;
    float out[OUTPUTS], s[KEYS / 2], rescale[2];
    uint32_t weights[KEYS / 4];
    row_state rows, last; /* of this piece, and of the one before when this one begins */
    bool weighed = false; /* there are weights of the tile before, to be multiplied */
    int add = 0;          /* 0: they are a piece's first */
    place here;
    progress at = {.number = -1};
    if (consumer == CONSUMERS - 1) pass_turn(consumer); /* consumer 0 begins */
    next_piece(pipe, consumer, &at);
    start_piece(pipe, p, &at, consumer, &here, &rows);
    for (;;) {
        const tile_count before = at.count - 1;
        int next = 0;
        if (at.count) barrier_wait(&pipe->state->v_full[stage_of(before)], parity_of(before));
        wait_for_keys(pipe, &at);
        wait_for_turn(consumer);
        ask(out, s, weights, q_place(pipe, consumer), k_place(pipe, at.count),
            v_place(pipe, before), weighed, is_needed(&at), add, consumer);
        if (is_needed(&at)) {
            const units u = finish_scores(pipe, p, sm90, &at, &here, s, consumer);
            next = softmax(s, &rows, rescale, &u, at.tile == 0);
        }
        await_values(out, weights, next);
        if (at.count) release(&pipe->state->v_empty[stage_of(before)]);
        if (at.tile == 0) {
            if (at.number)
                broken |= finish(p, &find_slot(pipe, at.number - 1)->tile, pipe->staging, &last,
                                 out, consumer);
            if (!at.tiles) break;
        }
        if (next & RESCALE) rescale_outputs(out, rescale);
        if (next & RENEW) {
            renew(pipe, p, sm90, &at, &here, s, &rows, rescale, consumer);
            if (at.tile) rescale_outputs(out, rescale);
        }
        weighed = is_needed(&at);
        add = at.tile;
        if (weighed) round_weights(weights, s);
#if GENERAL
        if (weighed && p->dropout_threshold)
            drop_weights(p, find_slot(pipe, at.number), weights, consumer, at.tile * KEYS);
#endif
        release_tile(pipe, sm90, &at, consumer);
        next_tile(pipe, consumer, &at);
        if (at.tile == 0) {
            last = rows;
            start_piece(pipe, p, &at, consumer, &here, &rows);
        }
    }
    if (consumer == 0) wait_for_turn(consumer); /* takes the turn that is left */
    return broken;
}

#endif
