/* From views to tensor maps. */
#include "cuda/view_map.h"

#include <string.h>

#include "cuda/family.h"

bool fa_cuda_is_broadcast(const fa_view *v, int axis) { return v->stride[axis] == 0; }

fa_sm90_steps fa_cuda_map_steps(const fa_view *v)
{
    return (fa_sm90_steps){.head = !fa_cuda_is_broadcast(v, 2),
                           .block = !fa_cuda_is_broadcast(v, 0)};
}

/* Unsigned, so that no stride is too large here; fa_tensor_map_fits checks it. */
static void set_axis(fa_tensor_map_shape *map, int axis, int64_t extent, uint64_t stride_bytes,
                     int32_t box)
{
    map->extent[axis] = (uint64_t)extent;
    map->stride[axis] = stride_bytes;
    map->box[axis] = (uint32_t)box;
}

void fa_cuda_map_view(fa_tensor_map_shape *map, const fa_view *v, int64_t d, int64_t rows,
                      int64_t heads, int64_t blocks, int32_t box_rows)
{
    const fa_element element = (fa_element)v->dtype;
    const uint64_t bytes = (uint64_t)FA_ELEMENT_BYTES(element);
    map->base = v->data;
    map->element = element;
    map->axes = 4;
    set_axis(map, 0, d, bytes * (uint64_t)v->stride[3], (int32_t)(128 / bytes));
    set_axis(map, 1, rows, bytes * (uint64_t)v->stride[1], box_rows);
    set_axis(map, 2, fa_cuda_is_broadcast(v, 2) ? 1 : heads, bytes * (uint64_t)v->stride[2], 1);
    set_axis(map, 3, fa_cuda_is_broadcast(v, 0) ? 1 : blocks, bytes * (uint64_t)v->stride[0], 1);
}

void fa_cuda_map_groups(fa_tensor_map_shape *map, const fa_view *v, int64_t d, int64_t rows,
                        int64_t heads, int64_t blocks, int32_t group, int32_t box_rows)
{
    fa_cuda_map_view(map, v, d, rows, heads, blocks, box_rows / group);
    map->axes = 5;
    for (int i = 4; i > 1; i--) {
        map->extent[i] = map->extent[i - 1];
        map->stride[i] = map->stride[i - 1];
        map->box[i] = map->box[i - 1];
    }
    map->extent[1] = map->box[1] = (uint32_t)group;
    map->stride[1] = map->stride[3]; /* from head to head */
    map->extent[3] = (map->extent[3] + (uint32_t)group - 1) / (uint32_t)group;
    map->stride[3] *= (uint32_t)group;
}

fa_view fa_cuda_score_rows(const fa_view *v)
{
    return (fa_view){v->data, v->dtype, {v->stride[0], v->stride[2], v->stride[1], v->stride[3]}};
}

bool fa_cuda_map_bias(const fa_problem *p, fa_tensor_map_shape *map)
{
    const fa_view v = fa_cuda_score_rows(&p->bias);
    if (!v.data || (v.dtype != FA_FLOAT16 && v.dtype != FA_BFLOAT16)) return false;
    if (fa_cuda_has_own_lengths(p) || v.stride[3] != 1 || fa_cuda_is_broadcast(&v, 1)) return false;
    fa_cuda_map_view(map, &v, p->n_k, p->rows_q, p->heads_q, p->batch, 64);
    return fa_tensor_map_fits(map, NULL);
}

bool fa_cuda_maps_fit(const fa_tensor_map_shape *maps, const char *const *names, int count,
                      char *why, size_t size)
{
    for (int i = 0; i < count; i++) {
        const char *reason;
        if (fa_tensor_map_fits(&maps[i], &reason)) continue;
        fa_cuda_say(why, size, "%s: %s", names[i], reason);
        return false;
    }
    return true;
}

bool fa_cuda_encode_maps(const fa_tensor_map_shape *maps, fa_sm90_map *const *to, int count,
                         fa_cuda_encoder *encode, fa_cuda_fault *fault)
{
    for (int i = 0; i < count; i++) {
        fa_tensor_map map;
        if (!encode(&map, &maps[i], fault)) return false;
        memcpy(to[i], &map, sizeof map);
    }
    return true;
}
