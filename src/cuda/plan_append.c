/* append_simt: fa_append, in one launch. */
#include "cuda/plan_append.h"

#include <string.h>

#include "cuda/family.h"
#include "cuda/parameters.h"

/* Items of each kind: a row of one head. */
static void count_items(const fa_append_problem *p, int64_t items[FA_APPEND_KINDS])
{
    const int64_t keys = p->blocks_new * p->arrays.rows_new * p->heads_kv;
    items[FA_APPEND_KEYS] = keys;
    items[FA_APPEND_VALUES] = p->v_new.data ? keys : 0;
    items[FA_APPEND_QUERIES] = p->q.data ? p->blocks_q * p->arrays.rows_q * p->heads_q : 0;
}

/* Warps for the row of a sequence in row_table_after. */
static int64_t count_table_warps(const fa_append_arrays *a)
{
    if (!a->row_table_after || a->batch == 0) return 0;
    const int64_t wanted = fa_cuda_count_tiles(fa_append_room(a), 32 * FA_APPEND_LANE_ENTRIES);
    const int64_t most = FA_APPEND_TABLE_WARPS / a->batch;
    return wanted < most ? wanted : most > 0 ? most : 1;
}

void fa_cuda_set_append_params(const fa_append_problem *p, const fa_cuda_plan_launch *l,
                               fa_append_params *params)
{
    const fa_append_arrays *a = &p->arrays;
    int64_t items[FA_APPEND_KINDS], end = 0;
    memset(params, 0, sizeof *params);
    params->arrays = *a;
    params->cos = fa_cuda_view(&p->cos, 0);
    params->sin = fa_cuda_view(&p->sin, 0);
    params->rotary_offset = (int32_t)p->rotary_offset;
    params->interleaved = p->interleaved;
    params->one_position = p->one_position;
    params->write_scales = p->write_scales;
    params->tasks = l->tiles;
    params->table_warps = count_table_warps(a);
    count_items(p, items);
    for (int kind = 0; kind < FA_APPEND_KINDS; kind++) {
        const bool values = kind == FA_APPEND_VALUES, queries = kind == FA_APPEND_QUERIES;
        fa_append_kind *k = &params->kinds[kind];
        k->from = fa_cuda_view(queries ? &p->q : values ? &p->v_new : &p->k_new, 0);
        k->to = fa_cuda_view(queries ? &p->q_out : values ? &p->v_cache : &p->k_cache, 0);
        if (!queries) k->scale = fa_cuda_view(values ? &p->v_scale : &p->k_scale, 0);
        k->cu_seqlens = queries ? a->cu_seqlens_q : a->cu_seqlens_new;
        k->seqlens = queries ? a->seqlens_q : a->seqlens_new;
        k->rows = queries ? a->rows_q : a->rows_new;
        k->heads = queries ? p->heads_q : p->heads_kv;
        k->end = end += items[kind];
        k->columns = (int32_t)(values ? p->d_v : p->d);
        k->rotary_dim = values ? 0 : (int32_t)p->rotary_dim;
        k->cached = !queries;
    }
}

static bool queue_append(void *kernel, const fa_cuda_plan *plan, const fa_cuda_plan_launch *l,
                         const fa_cuda_call *call, fa_cuda_fault *fault)
{
    fa_append_params params;
    fa_cuda_set_append_params(call->append, l, &params);
    return fa_cuda_queue(kernel, plan, l, call->stream, (void *[]){&params}, fault);
}

bool fa_cuda_plan_append(const fa_append_problem *p, const fa_cuda_device *device,
                         fa_cuda_plan *plan, char *why, size_t size)
{
    int64_t items[FA_APPEND_KINDS], total = 0;
    plan->passed_over[0] = 0;
    fa_cuda_plan_begin(device, NULL, plan);
    fa_cuda_plan_launch *l =
        fa_cuda_plan_add(&fa_variants[FA_VARIANT_append_simt], FA_APPEND_THREADS, 0, queue_append,
                         device, plan, why, size);
    if (!l) return false;
    count_items(p, items);
    for (int kind = 0; kind < FA_APPEND_KINDS; kind++) total += items[kind];
    const int64_t tasks = fa_cuda_count_tiles(total, FA_APPEND_ITEMS);
    /* Without rows there are still lengths and tables to write; any number of blocks does this. */
    const fa_append_arrays *a = &p->arrays;
    const bool arrays =
        ((a->lengths_after || a->block_table_after) && a->batch > 0) || a->cu_seqlens_after;
    int64_t blocks = fa_cuda_count_tiles(count_table_warps(a) * a->batch, FA_APPEND_ITEMS);
    if (blocks == 0 && arrays) blocks = 1;
    fa_cuda_set_tasks(l, tasks, tasks > blocks ? tasks : blocks);
    return true;
}
