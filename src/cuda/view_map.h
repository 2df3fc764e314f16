/*
 * Tensor maps of the caller's tensors, with which the kernels of Hopper load them.
 */
#ifndef FA_CUDA_VIEW_MAP_H
#define FA_CUDA_VIEW_MAP_H

#include "../../kernels/forward_sm90/forward_sm90.h"
#include "cuda/driver.h"
#include "cuda/tensor_map.h"
#include "problem.h"

/* The function that makes tensor maps: fa_cuda_encode_map, or its replacement in tests. */
typedef bool fa_cuda_encoder(fa_tensor_map *map, const fa_tensor_map_shape *shape,
                             fa_cuda_fault *fault);

/* Whether an axis has a stride of 0: it cannot be mapped, so in the map it has one index. */
bool fa_cuda_is_broadcast(const fa_view *view, int axis);

/* The factors of indices that follow. */
fa_sm90_steps fa_cuda_map_steps(const fa_view *view);

/* The map of a tensor: boxes of box_rows rows, as wide as the swizzle, 128 bytes. */
void fa_cuda_map_view(fa_tensor_map_shape *map, const fa_view *view, int64_t d, int64_t rows,
                      int64_t heads, int64_t blocks, int32_t box_rows);

/* The same for query rows of which `group` neighbouring heads follow each other for each query: boxes of box_rows / group
 * queries. Axes (dim, head of the group, row, group, block). */
void fa_cuda_map_groups(fa_tensor_map_shape *map, const fa_view *view, int64_t d, int64_t rows,
                        int64_t heads, int64_t blocks, int32_t group, int32_t box_rows);

/* A bias, or its gradient, as a tensor of (batch, query, head, key). */
fa_view fa_cuda_score_rows(const fa_view *view);

/* Whether TMA can load boxes of 64 x 64 of the bias, and its map: 16-bit elements, an axis for each query, a sequence in each
 * batch item. If sequences have different lengths, the bias may end with the longest one, and memory after it must not be
 * read; but only the device knows this length. */
bool fa_cuda_map_bias(const fa_problem *problem, fa_tensor_map_shape *map);

/* Whether all tensors can be mapped; else why names the tensor that cannot, with the reason. */
bool fa_cuda_maps_fit(const fa_tensor_map_shape *maps, const char *const *names, int count,
                      char *why, size_t size);

/* Makes `count` maps. */
bool fa_cuda_encode_maps(const fa_tensor_map_shape *maps, fa_sm90_map *const *to, int count,
                         fa_cuda_encoder *encode, fa_cuda_fault *fault);

#endif
