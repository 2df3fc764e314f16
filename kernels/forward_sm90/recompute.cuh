/*
 * Recomputed rows. A key that a boolean mask or a bias of -infinity hides has the weight 0. But its value may be NaN or
 * infinite, and then the product is NaN. So rows whose outputs are not finite are recomputed, key by key, without the
 * values of keys of weight 0. This happens after the block has done all of its work: with loops over keys next to those
 * over tiles, the compiler would treat the main loop as divergent, at half the speed.
 */
#ifndef FA_KERNELS_FORWARD_SM90_RECOMPUTE_CUH
#define FA_KERNELS_FORWARD_SM90_RECOMPUTE_CUH

#include "forward_sm90/config.cuh"
#include "common/reduce.cuh"
#include "common/score_options.cuh"
#include "common/softmax.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/convert.cuh"
#include "forward_sm90/recompute_row.cuh"

/* Kernels whose keys may be split describe the work tiles that have all of their keys. */
#ifndef DESCRIBE_WHOLE
#define DESCRIBE_WHOLE describe_work_tile
#endif

FA_DEVICE bool is_finite_row(const fa_attention_params *p, const char *row)
{
    float seen = 0;
    for (int c = FIRST_COLUMN + (int)(threadIdx.x % 32); c < columns_to(p); c += 32)
        seen += fa_load_element(row, p->out.dtype, c) * 0.0f;
    return !__any_sync(0xffffffff, seen != 0.0f);
}

/* The warp's rows of all of the block's work tiles. */
FA_DEVICE void recompute_rows(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s, int consumer)
{
    work_tile w;
    int64_t task = 0;
    __syncwarp(); /* outputs of the other lanes can be read */
    for (int64_t number = 0; task != TASK_END; number++) {
        task = find_task(pipe, p, s, number);
        if (!DESCRIBE_WHOLE(p, s, task, &w)) continue;
        const fa_tile *t = &w.query_tile;
        const int64_t first = t->first + consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16;
        for (int64_t i = first; i < fa_min64(first + 16, t->n_q); i++) {
            char *row = fa_view_row(&p->out, t->block_q, t->start_q + i, t->head);
            if (is_finite_row(p, row)) continue;
            const float lse = recompute_row(p, t, i, row);
            if (RECOMPUTES_LSE && p->lse && FIRST_COLUMN == 0 && threadIdx.x % 32 == 0)
                p->lse[(t->block_q * p->heads_q + t->head) * p->rows_q + t->start_q + i] = lse;
        }
    }
}

#endif
