/*
 * The end of a piece: outputs are divided by the sums of weights and written, with the log-sum-exp.
 */
#ifndef FA_KERNELS_FORWARD_SM90_RESULTS_CUH
#define FA_KERNELS_FORWARD_SM90_RESULTS_CUH

/* Columns of the results from the block's first one on; where they begin in the piece's first row. */
FA_DEVICE int columns_left(const fa_attention_params *p) { return p->d_v - FIRST_COLUMN; }
FA_DEVICE char *results_of(const piece *w) { return w->out + 2 * FIRST_COLUMN; }

/* Rows of a warp in its staging area: 16 of 128 bytes, whose pieces of 16 bytes lie elsewhere in each
 * row, so that neither columns nor rows meet one bank twice. */
FA_DEVICE char *staged(char *staging, int row, int piece_of_16)
{
    return staging + row * 128 + (piece_of_16 ^ row % 8) * 16;
}

/* Two neighbours of a row's outputs, times its factor: 0 where that is 0, whatever they are. */
FA_DEVICE uint32_t finished_pair(const float *x, float factor)
{
    return factor == 0.0f ? 0 : pack_pair(x[0] * factor, x[1] * factor);
}

/* 64 columns of the warp's 16 rows, as they lie in registers, to shared memory. */
FA_DEVICE void stage_columns(char *staging, const float *out, const float *factor)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            r[i] = finished_pair(out + 4 * (j + i / 2) + 2 * (i % 2), factor[i % 2]);
        store_matrix_x4(shared_address(staged(staging, lane % 16, j + lane / 16)), r);
    }
}

/* From there to the caller's rows: each lane 16 bytes, eight lanes a row. to: where the lane's first row
 * goes; four such rows follow each other in steps of step bytes, of which left are the caller's. whole: all
 * rows of all lanes are, so that no lane has to ask. */
FA_DEVICE void write_staged(char *staging, char *to, int64_t step, int left, bool whole)
{
    const int lane = threadIdx.x % 32;
    uint4 x[4];
#pragma unroll
    for (int part = 0; part < 4; part++)
        x[part] = *(const uint4 *)staged(staging, part * 4 + lane / 8, lane % 8);
    if (whole) {
#pragma unroll
        for (int part = 0; part < 4; part++) store_16_bytes(to + part * step, x[part]);
        return;
    }
#pragma unroll
    for (int part = 0; part < 4; part++)
        if (part * 4 < left) store_16_bytes(to + part * step, x[part]);
}

FA_DEVICE void store_staged(const fa_attention_params *p, const piece *w, char *staging,
                            const float *out, const float *factor, int first_row)
{
    const int lane = threadIdx.x % 32, first_column = lane % 8 * 8;
    const int room = w->room, row = first_row + lane / 8, columns = columns_left(p);
    const bool whole = room - first_row >= 16 && columns == VALUE_DIM;
    const int64_t stride = 2 * p->out.stride[1], step = 4 * stride;
    char *to = results_of(w) + row * stride + 2 * first_column;
#pragma unroll
    for (int column = 0; column < VALUE_DIM; column += 64) {
        __syncwarp(); /* what was there has been read */
        stage_columns(staging, out + column / 2, factor);
        __syncwarp();
        write_staged(staging, to + 2 * column, step,
                     first_column + column < columns ? room - row : 0, whole);
    }
}

/* Two neighbouring lanes hold columns 4q, 4q+1 and 4q+2, 4q+3 of two blocks of eight columns. They
 * exchange so that each has four neighbours of one block: 8 bytes. */
FA_DEVICE uint2 gather_four(uint32_t first, uint32_t second)
{
    const bool odd = threadIdx.x & 1;
    const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
    return odd ? make_uint2(got, second) : make_uint2(first, got);
}

/* Writes what is in the row of columns column .. column+3: 16-bit elements, one by one. */
FA_DEVICE void store_each(uint16_t *row, int column, int columns, uint2 four)
{
    if (column < columns) row[column] = (uint16_t)four.x;
    if (column + 1 < columns) row[column + 1] = (uint16_t)(four.x >> 16);
    if (column + 2 < columns) row[column + 2] = (uint16_t)four.y;
    if (column + 3 < columns) row[column + 3] = (uint16_t)(four.y >> 16);
}

/* The thread's part of row r, times a factor. */
FA_DEVICE void gather_row(uint2 *fours, const float *out, int r, float factor)
{
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 16; j++) {
        const float *x = out + 8 * j + 2 * r;
        fours[j] = gather_four(finished_pair(x, factor), finished_pair(x + 4, factor));
    }
}

FA_DEVICE void store_row(const fa_attention_params *p, const uint2 *fours, char *row)
{
    const int first = (int)threadIdx.x % 2 * 8 + (int)threadIdx.x % 4 / 2 * 4;
    if (p->out.vector && columns_left(p) == VALUE_DIM) {
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++)
            store_8_bytes(row + 2 * (16 * j + first), fours[j]);
        return;
    }
    if (p->out.vector) {
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++)
            if (16 * j + first < columns_left(p))
                store_8_bytes(row + 2 * (16 * j + first), fours[j]);
        return;
    }
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 16; j++)
        store_each((uint16_t *)row, 16 * j + first, columns_left(p), fours[j]);
}

/* Both rows are gathered before one is stored: else the second would wait for the registers of the first. */
FA_DEVICE void store_rows(const fa_attention_params *p, const piece *w, const float *out,
                          const float *factor, int consumer)
{
    const int first = row_of(consumer, 0), room = w->room;
    char *row = results_of(w) + first * (2 * p->out.stride[1]);
    uint2 fours[2][VALUE_DIM / 16];
#pragma unroll
    for (int r = 0; r < 2; r++) gather_row(fours[r], out, r, factor[r]);
    if (first < room) store_row(p, fours[0], row);
    if (first + 8 < room) store_row(p, fours[1], row + 8 * (2 * p->out.stride[1]));
}

#if HIDES_VALUES

/* Whether what the warp has is finite, but for rows of factor 0: if not, see redo.cuh. */
FA_DEVICE bool is_finite_for_warp(const float *out, const float *factor)
{
    float seen[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; i++) seen[i / 2 % 2] += out[i] * 0.0f;
    return !__any_sync(0xffffffff, (factor[0] != 0.0f && seen[0] != 0.0f) ||
                                       (factor[1] != 0.0f && seen[1] != 0.0f));
}

#endif

/* The sums of both rows' weights. */
FA_DEVICE void find_sums(const row_state *rows, float *sum)
{
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] = rows->sum[r];
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], apart);
}

/* The power of two that x is in, and that power's inverse; 0 and 1 for what has none. */
FA_DEVICE int exponent_of(float x)
{
    const int e = (__float_as_int(x) >> 23) - 127;
    return e > -127 && e < 127 ? e : 0;
}

FA_DEVICE float inverse_power(int e) { return __int_as_float((127 - e) << 23); }

/* What a row's outputs are multiplied by where there is a sink, or the log-sum-exp is asked for, which it
 * writes. base: the row's; i: which row of the piece it is. The sum's power of two goes to the base, for each
 * may be far from what their sum is: log-sum-exp would lose what cancels. */
FA_DEVICE float finish_row(const fa_attention_params *p, const piece *w, float base, float sum,
                           int i)
{
    const fa_tile *t = &w->tile;
    const float ln2 = 0.69314718055994530942f, sink = p->sinks ? p->sinks[t->head] : -INFINITY;
    const int e = exponent_of(sum);
    const float down = inverse_power(e);
    const float top = base == NOTHING_SEEN ? -INFINITY : (base + (float)e) * ln2;
    float lse;
    const float factor = fa_softmax_finish(top, sum * down, sink, &lse) * down;
    if (i >= w->queries) lse = -INFINITY;
    if (i < w->room && p->lse && FIRST_COLUMN == 0 && threadIdx.x % 4 == 0)
        p->lse[(t->block_q * p->heads_q + t->head) * p->rows_q + t->start_q + t->first + i] = lse;
    return factor;
}

/* What the outputs of both rows are multiplied by. Ordinary ones are done without a branch, for the tensor
 * cores wait. first: which row of the piece the thread's first one is. */
FA_DEVICE void find_factors(const fa_attention_params *p, const piece *w, const row_state *rows,
                            int first, float *factor)
{
    const int queries = w->queries;
    float sum[2];
    find_sums(rows, sum);
    if (p->lse || p->sinks) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            factor[r] = finish_row(p, w, rows->base[r], sum[r], first + 8 * r);
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool unseen = rows->base[r] == NOTHING_SEEN && sum[r] == sum[r];
            factor[r] = unseen ? 0.0f : reciprocal_fast(sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (OPTIONS && p->dropout_threshold) factor[r] *= p->dropout_scale;
        if (first + 8 * r >= queries) factor[r] = 0.0f;
    }
}

/* Divides by the sums and writes out and lse; zeros and -infinity in rows that are no query's. Returns
 * whether rows of the warp have to be done once more. */
FA_DEVICE bool finish(const fa_attention_params *p, const piece *w, char *staging,
                      const row_state *rows, float *out, int consumer)
{
    const int first = row_of(consumer, 0);
    float factor[2];
    find_factors(p, w, rows, first, factor);
    const int warp_row = consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16;
#if HIDES_VALUES
    const bool broken = (p->bias.data || p->mask.data) && !is_finite_for_warp(out, factor);
#else
    const bool broken = false;
#endif
    if (STAGED && p->out.vector == 8)
        store_staged(p, w, staging + warp_row * 128, out, factor, warp_row);
    else store_rows(p, w, out, factor, consumer);
    return broken;
}

#endif
