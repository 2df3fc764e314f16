/* The parameters of kernels for a problem. */
#include "cuda/parameters.h"

static const int8_t element_size[] = {4, 2, 2, 1, 1, 1};

/* Whether rows of this many elements consist of groups of 8 or 4 elements that the device can move at
 * once. */
static bool moves_groups(const fa_view *v, int64_t columns, int group)
{
    const uint64_t unit = (uint64_t)group * (uint64_t)element_size[v->dtype];
    const uint64_t counts = (uint64_t)columns | (uint64_t)v->stride[0] | (uint64_t)v->stride[1] |
                            (uint64_t)v->stride[2];
    const bool whole = (counts & ((uint64_t)group - 1)) == 0;
    return whole && v->stride[3] == 1 && ((uintptr_t)v->data & (unit - 1)) == 0;
}

bool fa_cuda_moves_eight(const fa_view *v, int64_t columns) { return moves_groups(v, columns, 8); }

/* Writes the view in place: copying a view that was just made would wait for the stores of its parts. */
static void set_view(fa_kernel_view *view, const fa_view *v, int64_t columns)
{
    view->data = v->data;
    for (int axis = 0; axis < 4; axis++) view->stride[axis] = v->stride[axis];
    view->dtype = (int32_t)v->dtype;
    view->vector = 0;
    if (v->data && columns)
        view->vector = moves_groups(v, columns, 8) ? 8 : moves_groups(v, columns, 4) ? 4 : 0;
}

fa_kernel_view fa_cuda_view(const fa_view *v, int64_t columns)
{
    fa_kernel_view view;
    set_view(&view, v, columns);
    return view;
}

void fa_cuda_set_params(const fa_problem *p, const fa_cuda_plan_launch *launch,
                        fa_attention_params *params)
{
    set_view(&params->q, &p->q, p->d);
    set_view(&params->k, &p->k, p->d);
    set_view(&params->v, &p->v, p->d_v);
    set_view(&params->out, &p->out, p->d_v);
    set_view(&params->bias, &p->bias, 0);
    set_view(&params->mask, &p->mask, 0);
    params->lse = p->lse;
    params->batch = p->batch;
    params->heads_q = p->heads_q;
    params->heads_kv = p->heads_kv;
    params->rows_q = p->rows_q;
    params->rows_k = p->rows_k;
    params->max_k = p->block_table && p->blocks_k == 0 ? 0 : p->n_k;
    params->d = (int32_t)p->d;
    params->d_v = (int32_t)p->d_v;
    params->scale = p->scale;
    params->softcap = p->softcap;
    params->causal = p->causal;
    params->diagonal_given = p->diagonal_given;
    params->diagonal = p->diagonal;
    params->window_left = p->window_left;
    params->window_right = p->window_right;
    params->attention_chunk = p->attention_chunk;
    set_view(&params->k_scale, &p->k_scale, 0);
    set_view(&params->v_scale, &p->v_scale, 0);
    params->alibi_slopes = p->alibi_slopes;
    params->alibi_batch_stride = p->alibi_batch_stride;
    params->sinks = p->sinks;
    params->dropout_threshold = p->dropout_threshold;
    params->dropout_scale = p->dropout_scale;
    params->dropout_seed = p->dropout_seed;
    params->dropout_offset = p->dropout_offset;
    params->dropout_state = p->dropout_state;
    params->cu_seqlens_q = p->cu_seqlens_q;
    params->cu_seqlens_k = p->cu_seqlens_k;
    params->seqlens_q = p->seqlens_q;
    params->seqlens_k = p->seqlens_k;
    params->block_table = p->block_table;
    params->block_table_stride = p->block_table_stride;
    params->pages = !p->block_table ? 0 : p->blocks_k <= INT32_MAX ? p->blocks_k : INT64_C(1) << 31;
    params->q_descale = p->q_descale;
    params->k_descale = p->k_descale;
    /* Also read for rows of no sequence; an empty batch has none. */
    params->v_descale = p->batch ? p->v_descale : NULL;
    params->fewest_queries = launch->fewest_queries;
    params->tiles = launch->tiles;
    params->tasks = launch->tasks;
}
