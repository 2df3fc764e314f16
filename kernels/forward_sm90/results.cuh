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

/* 64 columns of the warp's 16 rows, as they lie in registers, to shared memory. */
FA_DEVICE void stage_columns(char *staging, const float *out, const float *factor)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = out + 4 * (j + i / 2) + 2 * (i % 2);
            r[i] = pack_pair(x[0] * factor[i % 2], x[1] * factor[i % 2]);
        }
        store_matrix_x4(shared_address(staged(staging, lane % 16, j + lane / 16)), r);
    }
}

/* From there to the caller's rows: each lane 16 bytes, eight lanes a row. to: where the lane's first row
 * goes; four such rows follow each other in steps of step bytes, of which left are the caller's. */
FA_DEVICE void write_staged(char *staging, char *to, int64_t step, int left)
{
    const int lane = threadIdx.x % 32;
    uint4 x[4];
#pragma unroll
    for (int part = 0; part < 4; part++)
        x[part] = *(const uint4 *)staged(staging, part * 4 + lane / 8, lane % 8);
#pragma unroll
    for (int part = 0; part < 4; part++)
        if (part * 4 < left) *(uint4 *)(to + part * step) = x[part];
}

FA_DEVICE void store_staged(const fa_attention_params *p, const piece *w, char *staging,
                            const float *out, const float *factor, int first_row)
{
    const int lane = threadIdx.x % 32, first_column = lane % 8 * 8;
    const int row = first_row + lane / 8, left = w->room - row;
    const int64_t stride = 2 * p->out.stride[1], step = 4 * stride;
    char *to = results_of(w) + row * stride + 2 * first_column;
#pragma unroll
    for (int column = 0; column < VALUE_DIM; column += 64) {
        __syncwarp(); /* what was there has been read */
        stage_columns(staging, out + column / 2, factor);
        __syncwarp();
        write_staged(staging, to + 2 * column, step,
                     first_column + column < columns_left(p) ? left : 0);
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

/* The thread's part of one row, times a factor. */
FA_DEVICE void store_row(const fa_attention_params *p, const float *out, int r, float factor,
                         bool mine, char *row)
{
    const int first = (int)threadIdx.x % 2 * 8 + (int)threadIdx.x % 4 / 2 * 4;
    uint2 fours[VALUE_DIM / 16];
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 16; j++) {
        const float *x = out + 8 * j + 2 * r;
        fours[j] = gather_four(pack_pair(x[0] * factor, x[1] * factor),
                               pack_pair(x[4] * factor, x[5] * factor));
    }
    if (!mine) return;
    if (p->out.vector && columns_left(p) == VALUE_DIM) {
        uint2 *to = (uint2 *)(row + 2 * first);
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++) to[4 * j] = fours[j];
        return;
    }
    if (p->out.vector) {
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++)
            if (16 * j + first < columns_left(p)) *(uint2 *)(row + 2 * (16 * j + first)) = fours[j];
        return;
    }
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 16; j++)
        store_each((uint16_t *)row, 16 * j + first, columns_left(p), fours[j]);
}

FA_DEVICE void store_rows(const fa_attention_params *p, const piece *w, const float *out,
                          const float *factor, int consumer)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row_of(consumer, r);
        store_row(p, out, r, factor[r], i < w->room, results_of(w) + i * (2 * p->out.stride[1]));
    }
}

/* Rows of zeros, whatever out holds. */
FA_DEVICE void clear_row(float *out, int r)
{
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i++) out[4 * i + 2 * r] = out[4 * i + 2 * r + 1] = 0;
}

#if HIDES_VALUES

/* Whether what the warp has is finite: if not, see redo.cuh. */
FA_DEVICE bool is_finite_for_warp(const float *out)
{
    float seen = 0;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; i++) seen += out[i] * 0.0f;
    return !__any_sync(0xffffffff, seen != 0.0f);
}

#endif

/* The sum of a row's weights. */
FA_DEVICE float find_sum(const row_state *rows, int r)
{
    const float pair = rows->sum[r] + __shfl_xor_sync(0xffffffff, rows->sum[r], 1);
    return pair + __shfl_xor_sync(0xffffffff, pair, 2);
}

/* What row r's outputs are multiplied by; writes its log-sum-exp, if that is asked for. i: which row of
 * the piece it is. */
FA_DEVICE float finish_row(const fa_attention_params *p, const piece *w, const row_state *rows,
                           int r, int i)
{
    const fa_tile *t = &w->tile;
    const float ln2 = 0.69314718055994530942f;
    const float sum = find_sum(rows, r);
    const bool unseen = rows->base[r] == NOTHING_SEEN;
    float factor, lse;
    if (!p->lse && !p->sinks) factor = unseen && sum == sum ? 0.0f : 1.0f / sum;
    else {
        const float top = unseen ? -INFINITY : rows->base[r] * ln2;
        factor = fa_softmax_finish(top, sum, p->sinks ? p->sinks[t->head] : -INFINITY, &lse);
        if (i >= w->queries) lse = -INFINITY;
        if (i < w->room && p->lse && FIRST_COLUMN == 0 && threadIdx.x % 4 == 0)
            p->lse[(t->block_q * p->heads_q + t->head) * p->rows_q + t->start_q + t->first + i] =
                lse;
    }
    if (GENERAL && p->dropout_threshold) factor *= p->dropout_scale;
    return i < w->queries ? factor : 0.0f;
}

/* Divides by the sums and writes out and lse; zeros and -infinity in rows that are no query's. Returns
 * whether rows of the warp have to be done once more. */
FA_DEVICE bool finish(const fa_attention_params *p, const piece *w, char *staging,
                      const row_state *rows, float *out, int consumer)
{
    const int first = row_of(consumer, 0);
    const float factor[2] = {finish_row(p, w, rows, 0, first),
                             finish_row(p, w, rows, 1, first + 8)};
    if (__any_sync(0xffffffff, factor[0] == 0.0f || factor[1] == 0.0f)) {
        if (factor[0] == 0.0f) clear_row(out, 0);
        if (factor[1] == 0.0f) clear_row(out, 1);
    }
    const int warp_row = consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16;
#if HIDES_VALUES
    const bool broken = (p->bias.data || p->mask.data) && !is_finite_for_warp(out);
#else
    const bool broken = false;
#endif
    if (STAGED && p->out.vector == 8)
        store_staged(p, w, staging + warp_row * 128, out, factor, warp_row);
    else store_rows(p, w, out, factor, consumer);
    return broken;
}

#endif
