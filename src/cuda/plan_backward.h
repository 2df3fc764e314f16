/*
 * What the launches of backward tell their kernels. It is made apart from the
 * launches, so that tests need no driver.
 */
#ifndef FA_CUDA_PLAN_BACKWARD_H
#define FA_CUDA_PLAN_BACKWARD_H

#include "../../kernels/backward_simt/backward_simt.h"
#include "../../kernels/common/key_work.h"
#include "cuda/plan.h"

void fa_cuda_set_backward_params(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                 fa_backward_params *params);

/* What a plan is made for, and why there is none. */
typedef struct fa_cuda_planning {
    const fa_problem *problem;
    const fa_cuda_device *device;
    fa_cuda_plan *plan;
    char *why;
    size_t size;
} fa_cuda_planning;

/* Query heads that share a key/value head are split among at most so many blocks: a group may have millions of heads. */
enum { FA_CUDA_MOST_SPLITS = 1024 };

/* How many blocks, or clusters, share the `tasks` tiles of keys, each with some of the query heads that share a key/value head.
 * room: how many run at once.
 * Under a causal mask the first keys are seen by twice as many queries as the average, which six
 * blocks for each multiprocessor even out. Without a mask it matters how full the last round of
 * blocks is. The sums that blocks leave take at most the memory that 16-bit gradients for each
 * query head would. */
int fa_cuda_count_splits(const fa_problem *problem, int64_t tasks, int64_t room);

/* Whether later keys are seen by fewer queries, so that the blocks of a head differ in length. */
bool fa_cuda_shrinks(const fa_problem *problem);

/* Heads of a launch that make so many blocks, or clusters, as percent of the `at_once` that run at once. */
int64_t fa_cuda_count_heads_of_rounds(const fa_cuda_plan_launch *launch, int64_t at_once,
                                      int percent);

/* Heads whose blocks take turns, long blocks first, where sums have any order: under a causal mask those that make so many rounds of
 * blocks, otherwise one. If all heads make few rounds, the last such group counts most: its long blocks begin when all others are done.
 * With two rounds in it, of which half are short, all multiprocessors end together. If it would have fewer, more heads take turns: up to
 * twice as many, or all (H200, causal, one item: head dim 128, n 2k, 16 heads 1.03 times the rate, n 4k, 20 heads 1.10, n 8k, 10 heads
 * 1.13; 192, n 4k, 10 heads 1.10; (192, 128) 1.32. With 15 rounds it is no gain). */
int64_t fa_cuda_count_heads_in_turn(const fa_problem *problem, const fa_cuda_plan_launch *launch,
                                    int64_t at_once, int percent);

/* A reciprocal of x, or of 1 if x is less. */
fa_reciprocal fa_cuda_reciprocal(int64_t x);

/* Of `heads` heads with `tiles` key tiles each, `together` at a time. */
fa_turns fa_cuda_turns(int64_t heads, int64_t together, int64_t tiles);

/* For `tasks` blocks, `tiles` of each head. group: query heads that share keys; heads_kv: of an item. */
fa_key_divisors fa_cuda_key_divisors(int64_t tiles, int64_t tasks, int64_t group, int64_t heads_kv,
                                     int64_t together);

fa_uniform_lengths fa_cuda_uniform_lengths(const fa_problem *problem);

/* Adds the launch that adds up what splits of `main` leave, if there are several. slices: blocks for the keys of a block of
 * `main`. */
bool fa_cuda_add_finish_keys(const fa_cuda_planning *planning, const fa_variant *variant,
                             int threads, fa_cuda_queue_function *queue,
                             const fa_cuda_plan_launch *main, int splits, int slices);

/* Who makes dbias where the kernel of the other gradients can, and the workspace has room for its sums. */
fa_cuda_dbias fa_cuda_choose_dbias(const fa_problem *problem);

/* These sums, in a workspace at this offset. */
fa_view fa_cuda_dbias_sums(const fa_problem *problem, size_t offset);

/* Bytes of them. */
size_t fa_cuda_dbias_sum_bytes(const fa_problem *problem);

/* Adds the launch that comes before that kernel, if one is needed. */
bool fa_cuda_add_dbias_clear(const fa_cuda_planning *planning, fa_cuda_dbias dbias);

/* Tells the launches so far where its sums are, and adds the one that rounds them. */
bool fa_cuda_add_dbias_round(const fa_cuda_planning *planning, fa_cuda_dbias dbias,
                             size_t sums_offset);

/* What no kernel for tensor cores does: gradients of another type than the queries, and pages. */
bool fa_cuda_refuse_gradients(const fa_problem *problem, char *why, size_t size);

/* Backward keeps sums of the gradients of queries and keys in registers: head dims above 512 have no variant. */
bool fa_cuda_refuse_wide_backward(const fa_problem *problem, char *why, size_t size);

/* Adds what the gradients of a bias and of sinks take: delta behind the workspace so far, if there is one of them, and
 * launches for those that are wanted. A workspace is asked for before that is known. delta_offset: where an earlier launch is to
 * leave delta, 0: nobody wants it; NULL: a launch is added for that. */
bool fa_cuda_add_dbias_dsinks(const fa_cuda_planning *planning, fa_cuda_dbias dbias,
                              size_t *delta_offset);

#endif
