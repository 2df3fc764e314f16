/*
 * How a call is computed on a device: a list of launches. Planning is pure: numbers in, numbers out. So plans can be
 * tested without a GPU.
 *
 * Each pass has families of kernels (family.h), which are tried in order, the fastest first. plan.c chooses;
 * plan_<family>.c makes the launches.
 */
#ifndef FA_CUDA_PLAN_H
#define FA_CUDA_PLAN_H

#include <stdbool.h>
#include <stddef.h>

#include "../../kernels/check/check.h"
#include "../../kernels/forward_sm80/split.h"
#include "../../kernels/forward_sm90/split.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/tensor_map.h"
#include "cuda/variants.h"
#include "problem.h"

typedef struct fa_cuda_family fa_cuda_family;
typedef struct fa_cuda_plan fa_cuda_plan;
typedef struct fa_cuda_plan_launch fa_cuda_plan_launch;

/* The problem for which a plan is queued: that for which it was made; the others are NULL. */
typedef struct fa_cuda_call {
    const fa_problem *problem;
    const fa_combine_problem *combine;
    const fa_check_params *check;
    const fa_append_problem *append;
    void *stream;
} fa_cuda_call;

/* Queues a launch: makes the kernel's parameters, and passes them to fa_cuda_queue. */
typedef bool fa_cuda_queue_function(void *kernel, const fa_cuda_plan *plan,
                                    const fa_cuda_plan_launch *launch, const fa_cuda_call *call,
                                    fa_cuda_fault *fault);

/* The data of launches of forward_sm90 and forward_sm90_wide. */
typedef struct fa_cuda_sm90_launch {
    fa_tensor_map_shape maps[4]; /* of q, k, v and bias */
    bool bias_mapped;            /* the last one is set: TMA loads the bias */
    bool dynamic;                /* blocks take tasks from a counter, if there is one; */
    uint32_t static_grid;        /* otherwise there are so many blocks */
    fa_sm90_split split; /* of forward_sm90_split and forward_sm90_merge, without pointers */
} fa_cuda_sm90_launch;

/* Of forward_sm80: as in fa_sm80_params. Of forward_sm80_split and forward_sm80_merge: without pointers and strides. */
typedef struct fa_cuda_sm80_launch {
    int64_t causal_pairs, full_heads;
    fa_sm80_split split;
} fa_cuda_sm80_launch;

/* Of decode_sm80: as in fa_decode_params. */
typedef struct fa_cuda_decode_launch {
    int32_t heads, queries, chunks, whole, parts, least, most_queries;
    int32_t blocks;    /* the most persistent blocks; 0: each has a part and ends */
    int32_t stages;    /* of decode_sm90, that a block, or a group of a persistent one, uses */
    bool alone;        /* of decode_sm90: the next grid does not start before its blocks end */
    bool merges_apart; /* parts are merged by a second launch, whether there are counters or not */
} fa_cuda_decode_launch;

/* Of backward_sm90. */
typedef struct fa_cuda_backward_sm90_launch {
    fa_tensor_map_shape maps[6]; /* of q, k, v and dout; */
    bool bias_mapped;            /* of the bias, if TMA can load it; */
    int dbias_mapped;            /* of dbias or its sums: FA_BACKWARD_SM90_DBIAS_... */
    int64_t q_tiles;             /* query tiles of a head in the workspace */
    bool sums_transposed;        /* as in fa_backward_sm90_params */
    size_t rows_offset;          /* where they are in the launch's range of the workspace */
    size_t delta_offset;         /* of prepare: where it leaves delta; 0: nobody wants it */
    /* A head's sums are consecutive tiles, and follow those of the head before. */
    bool heads_in_order;
    bool ordered; /* sums have one order, by semaphores; then: */
    /* As in fa_backward_sm90_params: */
    int64_t heads_ascending, ascending_together;
    bool counts_pairs;
    int32_t tiles_ahead;
    bool first_stored;        /* in any order: first blocks run ahead */
    size_t semaphores_offset; /* where they are in the workspace, in both cases */
    size_t counter_offset;    /* of work tiles that persistent blocks have taken; 0: none */
    int64_t heads_together, items_together; /* as in fa_backward_sm90_params */
    int splits;                             /* the same: */
    int keys, head_dim, value_dim;
    size_t key_sums_offset;
    bool whole_dq;    /* blocks store dQ; its map is in the place of that of dbias */
    int query_parts;  /* as in fa_backward_sm90_params */
    bool even_splits; /* all have the same number of query heads */
    bool prepares;    /* as in fa_backward_sm90_params */
    struct {
        size_t offset; /* of the counters, behind which dS is left; in the workspace */
        int32_t units, room, blocks,
            summed;                  /* as in fa_backward_sm90_left; units 0: none is left */
        int32_t groups, group_units; /* as in fa_backward_sm90_left_groups */
    } left;
    /* Of variants that clear sums ahead, as in fa_backward_sm90_params; groups 0: prepare clears all. */
    size_t cleared_offset;
    int32_t groups, groups_ahead, group_blocks, group_tiles, sum_tiles;
    /* Of a joined variant, as in fa_backward_sm90_params; units 0: of another one. */
    size_t counters_offset;
    int32_t units, units_together, unit_heads, slices, head_slices;
} fa_cuda_backward_sm90_launch;

/* Of backward_sm80: the same without maps. */
typedef struct fa_cuda_backward_sm80_launch {
    int64_t q_tiles;
    bool in_place;  /* sums are in dq, not in the workspace */
    bool corrected; /* weights have factors */
    size_t rows_offset, factors_offset;
    bool split; /* queries and dout become float16 parts */
    size_t parts_offset, powers_offset;
    bool ordered;
    size_t semaphores_offset;
    int64_t heads_together;
    bool low_parts;
    int splits, query_parts, keys, head_dim; /* as in fa_backward_sm80_params */
    size_t key_sums_offset;
} fa_cuda_backward_sm80_launch;

/* How dbias, the gradient of the bias, is computed: by a separate kernel, or by that of the other gradients. The latter stores
 * dS if each element of dbias belongs to one score. Otherwise it adds in float32, to dbias itself or to sums in the workspace, or
 * it stores dS in the workspace and sums it there. */
typedef enum fa_cuda_dbias {
    FA_CUDA_DBIAS_ALONE,
    FA_CUDA_DBIAS_STORED,
    FA_CUDA_DBIAS_ADDED,
    FA_CUDA_DBIAS_SUMMED,
    FA_CUDA_DBIAS_LEFT
} fa_cuda_dbias;

/* One launch of a kernel. */
struct fa_cuda_plan_launch {
    int variant; /* its id */
    uint32_t grid, threads, smem_bytes;
    uint32_t cluster;       /* blocks of a cluster; 1: there are none */
    int tile_q, tile_k;     /* rows of a tile of queries and of keys; 0: it has none */
    int64_t fewest_queries; /* as in fa_attention_params */
    int64_t tiles;          /* of a batch item, or of all rows if packed */
    int64_t tasks;          /* tiles times heads times batch items */
    bool overlaps; /* it may start while the previous launch runs; its kernel waits for that one, or
                    * ends after it */
    bool idle;     /* there are no tasks, or the results are not needed: it is not queued */
    size_t workspace_offset, workspace_bytes; /* the range of the call's workspace that it uses */
    fa_cuda_queue_function *queue;
    fa_cuda_dbias dbias;
    size_t dbias_sums_offset; /* in the call's workspace, if they are summed there */
    union { /* what the family of the variant alone knows; nothing where it is not named here */
        fa_cuda_sm90_launch sm90;
        fa_cuda_sm80_launch sm80;
        fa_cuda_decode_launch decode;
        fa_cuda_backward_sm90_launch backward_sm90;
        fa_cuda_backward_sm80_launch backward_sm80;
    };
};

enum { FA_CUDA_LAUNCHES = 8 };

/* Only the first `count` launches are written. */
struct fa_cuda_plan {
    const fa_cuda_family *family; /* that made it; NULL for combine and checks */
    const char *arithmetic;       /* for fa_describe: "float32 sums on FMA units" */
    int device;                   /* the ordinal */
    size_t workspace_bytes;
    int count;
    fa_cuda_plan_launch launches[FA_CUDA_LAUNCHES]; /* in the order in which they are queued */
    char passed_over[320]; /* "; not sm80: q.dtype is float32"; "": the fastest of this device */
};

/* The family of the pass that FA_CUDA_KERNEL (backward: FA_CUDA_BACKWARD_KERNEL) names; NULL: the variable is not set. Both
 * are read once. False if the name is unknown; why then says so in a sentence. */
bool fa_cuda_asked_family(fa_pass pass, const fa_cuda_family **asked, char *why, size_t size);

/* The forward family of that name, "sm90", "sm80", "sm75", "simt" or "decode"; NULL: there is none. */
const fa_cuda_family *fa_cuda_find_family(const char *name);

/* A problem's plan. asked: the only family that is allowed, or, if it has does_few, the family that is
 * tried first; NULL: the fastest that can run it. False if no kernel can; why then says so in a sentence
 * that names the argument. If why is NULL, no refusals are written, which would cost more than the plan,
 * and passed_over stays empty. */
bool fa_cuda_plan_make(const fa_problem *problem, const fa_cuda_device *device,
                       const fa_cuda_family *asked, fa_cuda_plan *plan, char *why, size_t size);

/* One line for fa_describe. */
void fa_cuda_plan_describe(const fa_problem *problem, const fa_cuda_device *device,
                           const fa_cuda_plan *plan, char *text, size_t size);

/* Queues the plan's launches that are not idle on the call's stream. kernels: of each of these. */
bool fa_cuda_plan_queue(const fa_cuda_plan *plan, void *const kernels[FA_CUDA_LAUNCHES],
                        const fa_cuda_call *call, fa_cuda_fault *fault);

#endif
