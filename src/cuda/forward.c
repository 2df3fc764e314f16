/* From a problem and its plan to a launch. */
#include <string.h>

#include "cuda/backend.h"
#include "cuda/family.h"

static const int8_t element_size[] = {4, 2, 2, 1, 1};

/* Whether rows of so many elements are made of groups that the device can move at once. */
static bool moves_groups(const fa_view *v, int64_t columns, int group)
{
    const uintptr_t unit = (uintptr_t)group * (uintptr_t)element_size[v->dtype];
    bool aligned = columns % group == 0 && v->stride[3] == 1 && (uintptr_t)v->data % unit == 0;
    for (int axis = 0; axis < 3; axis++) aligned = aligned && v->stride[axis] % group == 0;
    return aligned;
}

fa_kernel_view fa_cuda_view(const fa_view *v, int64_t columns)
{
    fa_kernel_view view = {.data = v->data, .dtype = (int32_t)v->dtype};
    if (v->data && columns)
        view.vector = moves_groups(v, columns, 8) ? 8 : moves_groups(v, columns, 4) ? 4 : 0;
    memcpy(view.stride, v->stride, sizeof view.stride);
    return view;
}

fa_attention_params fa_cuda_attention_params(const fa_problem *p, const fa_cuda_plan *plan)
{
    return (fa_attention_params){
        .q = fa_cuda_view(&p->q, p->d),
        .k = fa_cuda_view(&p->k, p->d),
        .v = fa_cuda_view(&p->v, p->d_v),
        .out = fa_cuda_view(&p->out, p->d_v),
        .bias = fa_cuda_view(&p->bias, 0),
        .mask = fa_cuda_view(&p->mask, 0),
        .lse = p->lse,
        .batch = p->batch,
        .heads_q = p->heads_q,
        .heads_kv = p->heads_kv,
        .rows_q = p->rows_q,
        .rows_k = p->rows_k,
        .most_k = p->n_k,
        .d = (int32_t)p->d,
        .d_v = (int32_t)p->d_v,
        .scale = p->scale,
        .softcap = p->softcap,
        .causal = p->causal,
        .diagonal_given = p->diagonal_given,
        .diagonal = p->diagonal,
        .window_left = p->window_left,
        .window_right = p->window_right,
        .alibi_slopes = p->alibi_slopes,
        .alibi_batch_stride = p->alibi_batch_stride,
        .sinks = p->sinks,
        .dropout_threshold = p->dropout_threshold,
        .dropout_scale = p->dropout_scale,
        .dropout_seed = p->dropout_seed,
        .dropout_offset = p->dropout_offset,
        .dropout_state = p->dropout_state,
        .cu_seqlens_q = p->cu_seqlens_q,
        .cu_seqlens_k = p->cu_seqlens_k,
        .seqlens_q = p->seqlens_q,
        .seqlens_k = p->seqlens_k,
        .block_table = p->block_table,
        .block_table_stride = p->block_table_stride,
        .q_descale = p->q_descale,
        .k_descale = p->k_descale,
        .v_descale = p->v_descale,
        .tiles = plan->tiles,
        .tasks = plan->tasks,
    };
}

bool fa_cuda_launch_plain(void *kernel, const fa_problem *p, const fa_cuda_plan *plan,
                          fa_cuda_fault *fault)
{
    fa_attention_params params = fa_cuda_attention_params(p, plan);
    void *parameters[] = {&params};
    const fa_cuda_launch launch = {.grid = {plan->grid, 1, 1},
                                   .threads = plan->threads,
                                   .smem_bytes = plan->smem_bytes,
                                   .stream = p->stream};
    return fa_cuda_launch_kernel(kernel, &launch, parameters, fault);
}

bool fa_cuda_forward(void *kernel, const fa_problem *p, const fa_cuda_plan *plan,
                     fa_cuda_fault *fault)
{
    if (plan->tasks == 0) return true;
    return plan->family->launch(kernel, p, plan, fault);
}
