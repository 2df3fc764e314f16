/*
 * backward_sm90, run on the host (cuda_on_cpu.h, hopper_units.h): random problems that the planner
 * gives to it on an H200, compared with float64. The launches are those that the planner and the
 * backend make; only the tensor maps are this machine's. What backward needs from forward comes
 * from the CPU engine.
 *
 * Each problem runs twice, with different orders of the threads and different delays, and each
 * result is compared. Sums of dq are added in another order then, so dq's last bits may differ; all
 * other results must be the same. With FA_DETERMINISTIC, in half of the problems, dq must be the
 * same, too: then blocks run in order, the second time several side by side, so that they wait for
 * each other.
 *
 * After these problems come others with a bias and its gradient, with head dims above 96 and above
 * 128, and some that persistent blocks compute twice, or joined launches. For those, several blocks
 * run side by side the second time, and share the work tiles or wait for each other.
 *
 * Arguments: the first problem's number, how many, the least head dim, of keys or of values, and
 * "bias", "left" (the same on a device with one multiprocessor), "unseen" (the same with keys that
 * no query sees), "heads" (like "left", with many heads), "persistent" or "joined" for such problems,
 * "empty" for persistent blocks with lengths, some of them 0, "cleared" for those with sums that
 * blocks clear for later ones. Then the runs of each variant are printed.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "caller_memory.h"
#include "check.h"
#include "cuda/family.h"
#include "cuda/plan_backward.h"
#include "cuda/plan_backward_sm90.h"
#include "cuda_on_cpu.h"
#include "gpus.h"
#include "hopper_units.h"
#include "normalize.h"
#include "random_problem.h"
#include "sample.h"
#include "scalar.h"

/* More problems with options, for each of the variants that have some. */
static const int64_t with_options[] = {
    160,  168,  170,  245,  348,  380,  384,  482,  577,  631,  749,  787,  957,  1089, 1370,
    1385, 1499, 1554, 1557, 1596, 1663, 1828, 1832, 1973, 2003, 2068, 2143, 2168, 2317, 2323,
    2343, 2449, 2521, 2577, 2597, 2653, 2659, 2723, 2745, 2757, 2785, 2936, 2986, 3017};

/* One order of sums with head dims of 65 to 96, and sequences that have their own lengths. */
static const int64_t with_order_at_96[] = {300, 420};

/* Problems of the class of a bias and its gradient: stored, added, summed in the workspace, by
 * threads and by TMA; in the last one, blocks of batch items take turns. */
static const int64_t with_dbias[] = {62,  66,  103, 130, 162, 165, 167, 171, 275,
                                     306, 435, 449, 463, 500, 542, 543, 554, 1363};

/* The same for the variants of a bias alone, with each way of dbias. */
static const int64_t with_bias_alone[] = {121,   468,   2491,  3048,  4117,  5680,  6229,  6232,
                                          6683,  7092,  7274,  9272,  9647,  10241, 10992, 11002,
                                          12848, 14199, 14438, 15265, 17469, 17514, 17735, 17763,
                                          17987, 18127, 18422, 19210, 19304, 19417, 19973};

/* The same for wide heads, whose threads load the bias: with queries that see no key, more keys than a block has, and a bias for each
 * key. */
static const int64_t with_wide_bias[] = {157,  268,  2082, 2406, 2485, 2665, 3333,
                                         3399, 3564, 3704, 5266, 5786, 6523, 8846};

/* The same if blocks leave dS, on a device with one multiprocessor. An element of dbias has up to
 * eight shares. */
static const int64_t with_left_ds[] = {262,  605,  2368,  3462,  7092,  9272,  14946, 19844,
                                       2436, 3330, 4688,  5334,  5344,  6725,  8551,  8738,
                                       9170, 9556, 11858, 12307, 17104, 18242, 18848, 18950};

/* The same if no query sees the later keys of each item: their blocks leave nothing. */
static const int64_t with_unseen_keys[] = {17987};

/* The same with many heads that share dbias: units pass sums on, in six groups and in three. */
static const int64_t with_many_heads[] = {1395, 2515};

/* Persistent blocks where an item of the batch has no keys: it must count no share of dQ. */
static const int64_t with_empty_items[] = {2271};

/* Blocks that share the queries of a head with one key tile. */
static const int64_t with_query_parts[] = {22072, 23176, 25384, 29802, 36352};

/* The same with more key tiles, up to six, in each of the families. */
static const int64_t with_shared_queries[] = {1568, 9536, 13092, 16002, 18848};

/* Chains of two to four blocks, which do what `prepare` does or not: with rows that go through the
 * workspace, and rows of out that are not aligned. */
static const int64_t with_chains[] = {
    50181, 50369, 50373, 50457, 50493, 51077, 51349,  51728,  52061,  52173, 52237,
    52273, 52672, 53181, 53305, 54413, 54984, 55245,  55329,  56125,  56301, 58312,
    60365, 61258, 61592, 62113, 62237, 63018, 63077,  66058,  68257,  68961, 71778,
    75658, 76097, 79853, 90657, 93989, 94629, 101864, 103520, 106040, 108801};

/* Where the last share rounds dQ: blocks that ascend, others that do not, and query tiles with one
 * share; windows; heads that share keys, and both; in both types. */
static const int64_t with_rounding[] = {
    50093, 50296, 51200, 51288, 51472,  51728,  52025,  52061,  52173,  52672, 54085,
    54413, 54984, 56258, 56602, 56762,  58744,  59432,  61217,  61536,  64848, 64920,
    72466, 72976, 77480, 85338, 102961, 104778, 105474, 107330, 122096, 125970};

enum {
    PROBLEMS = 160,
    WIDE = 129,
    FIRST_WIDE_PROBLEM = 1000,
    WIDE_PROBLEMS = 1400,
    UNUSUAL_WIDE_PROBLEM = 3488, /* backward_sm90_d192_128_f16 without an order */
    FULL = 97,
    FIRST_FULL_PROBLEM = 720,
    FULL_PROBLEMS = 30,
    FIRST_CLEARED_PROBLEM = 9800,
    CLEARED_PROBLEMS = 400,
    PACKED_KEYS_PROBLEM = 13196, /* queries are not packed */
    FIRST_PERSISTENT_PROBLEM = 3500,
    PERSISTENT_PROBLEMS = 400,
    FIRST_JOINED_PROBLEM = 6200,
    JOINED_PROBLEMS = 450,
    FIRST_SINGLE_PROBLEM = 20000,
    SINGLE_PROBLEMS = 2000
};

typedef struct parameters {
    fa_backward_params backward;
    fa_backward_sm90_params more;
} parameters;

/* The variants, one FORM(name) each: the build writes them. */
#define FORM(name)                                                                                 \
    void name(fa_backward_params p, fa_backward_sm90_params s);                                    \
    static void run_##name(const void *p)                                                          \
    {                                                                                              \
        const parameters *both = p;                                                                \
        name(both->backward, both->more);                                                          \
    }
#include "test_backward_sm90_on_cpu_forms.h"
#undef FORM

/* The kernels that it shares with backward_simt. */
#define SHARED(name)                                                                               \
    void name(fa_backward_params p);                                                               \
    static void run_##name(const void *p)                                                          \
    {                                                                                              \
        const parameters *both = p;                                                                \
        name(both->backward);                                                                      \
    }
SHARED(backward_delta)
SHARED(backward_dbias_simt)
SHARED(backward_dsinks)
SHARED(backward_dbias_clear)
SHARED(backward_dbias_round)

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_backward_sm90_on_cpu_forms.h"
    FORM(backward_delta) FORM(backward_dbias_simt) FORM(backward_dsinks) FORM(backward_dbias_clear)
        FORM(backward_dbias_round)};

static int runs[FA_VARIANTS];
/* For head dims to 64, and above: whether TMA loaded a bias; how dbias was stored,
 * FA_BACKWARD_SM90_DBIAS_... */
static int biases_by_tma[2], dbias_by[2][FA_BACKWARD_SM90_DBIAS_ADDED + 1];
static int rooms_waited_for; /* runs whose blocks wait for room to leave dS */
static int sums_passed_on;   /* runs whose units pass sums of dbias on */
static int64_t least_dim;
static bool about_bias;    /* problems are of that class */
static bool about_lengths; /* the same */
static bool alone;         /* there is one multiprocessor */
static bool unseen;        /* no query sees the later keys */
static bool many_heads;
static const fa_cuda_family
    /* Of both runs; NULL: the second run has persistent blocks, if possible. */
    *few;
/* An H200, or one with few multiprocessors, for which plans differ. */
static fa_cuda_device device;

static int64_t blind_queries; /* those that were NaN */
static int rounded_otherwise; /* problems whose second run had other bits in dq */
static int ordered;           /* problems whose sums of dq have one order */
static int cleared_ahead;     /* launches whose blocks clear sums for later ones */
static int first_stored;      /* launches whose blocks add to first shares, in any order */

/* One run of a problem. */
typedef struct machine {
    int64_t number;
    bool otherwise;     /* the second one */
    bool ordered;       /* sums of dq have one order */
    bool leaves_ds;     /* dbias has one order, too */
    bool chained;       /* sums of dq have one order without waits in global memory */
    bool compared;      /* this run's result is compared; later calls are batch items alone */
    char *first;        /* all buffers after the first run */
    ref_buffers memory; /* what kernels may access */
} machine;

/* ---- Launches -------------------------------------------------------------------------------- */

/* Whether the kernel counts on static shared memory before its dynamic one. */
static bool relies_on_static(const fa_variant *v)
{
    return FA_BACKWARD_SM90_RELIES(v->head_dim, v->options, v->persistent, v->chained);
}

static bool is_main(const fa_cuda_plan_launch *l);
static bool is_shared(const fa_cuda_plan_launch *l);

/* Whether blocks wait for blocks of lower numbers before they leave their dS in the same place. */
static bool waits_for_room(const fa_cuda_plan_launch *l)
{
    return is_main(l) && l->backward_sm90.left.room < l->backward_sm90.left.units;
}

/* Whether units of blocks that leave dS pass sums on, and so wait for each other. */
static bool passes_sums_on(const fa_cuda_plan_launch *l)
{
    return is_main(l) && l->backward_sm90.left.groups > 1;
}

/* Whether blocks clear sums for later ones. Launches before and after the products have fewer
 * threads. */
static bool clears_ahead(const fa_cuda_plan_launch *l)
{
    return !is_shared(l) && l->threads >= FA_BACKWARD_SM90_THREADS && l->backward_sm90.groups > 0;
}

/* Whether a block's work tile is that of its number. Persistent blocks that have several take them in
 * the order in which they begin. */
static bool takes_by_number(const fa_cuda_plan_launch *l)
{
    return !fa_variants[l->variant].persistent || l->tasks <= l->grid;
}

/* Whether blocks wait for blocks of lower numbers before they add to sums that those clear. */
static bool waits_for_zeros(const fa_cuda_plan_launch *l)
{
    return clears_ahead(l) && takes_by_number(l);
}

/* Whether blocks wait for first shares, which blocks of lower numbers store. */
static bool adds_to_first_shares(const fa_cuda_plan_launch *l)
{
    return is_main(l) && l->backward_sm90.first_stored && !l->backward_sm90.ordered;
}

static bool waits_for_first_shares(const fa_cuda_plan_launch *l)
{
    return adds_to_first_shares(l) && takes_by_number(l);
}

/* Whether blocks do what `prepare` does. */
static bool prepares(const fa_cuda_plan_launch *l)
{
    return is_main(l) && l->backward_sm90.prepares;
}

/* All orders and delays; a slow warp, often one of the three that load or store. */
static void vary(cuda_run *run, const machine *m, const fa_cuda_plan_launch *l)
{
    const fa_variant *v = &fa_variants[l->variant];
    const bool in_order = m->ordered || v->joined || waits_for_room(l) || passes_sums_on(l) ||
                          waits_for_zeros(l) || waits_for_first_shares(l);
    const uint64_t bits = (uint64_t)m->number * 0x9E3779B97F4A7C15u;
    const unsigned delays = (unsigned)(bits >> 61), varied = m->otherwise ? ~delays : delays;
    const uint32_t lanes[] = {~0u, 1, ~1u, (uint32_t)(bits >> 24)};
    const unsigned warps = run->threads / 32, any = (unsigned)(bits >> 50 & 1023) % warps;
    run->backwards = varied & 1;
    run->late_copies = varied & 2;
    run->late_products = varied & 4;
    run->last_block_first = m->otherwise && !in_order;
    if (!m->otherwise) return;
    /* With two buffers of dS a consumer's warps rely on each other's products. */
    run->warps_multiply = bits >> 43 & 1 && FA_BACKWARD_SM90_DS_BUFFERS(v->head_dim, v->stages) > 2;
    if (in_order || v->persistent)
        run->together = run->cluster > 2 ? 1
                        : run->cluster   ? 2
                                         : 2 + (unsigned)(bits >> 45 & 3) % 3;
    run->first_block_slow = /* in a cluster, the other block waits for it */
        !run->cluster && in_order && !m->ordered && bits >> 44 & 1;
    run->slow_warp = bits >> 56 & 1 ? (unsigned)(bits >> 57 & 7) % 3 : any;
    run->slow_lanes = lanes[bits >> 40 & 3];
}

static bool is_shared(const fa_cuda_plan_launch *l)
{
    const int shared[] = {FA_VARIANT_backward_delta, FA_VARIANT_backward_dbias_simt,
                          FA_VARIANT_backward_dsinks, FA_VARIANT_backward_dbias_clear,
                          FA_VARIANT_backward_dbias_round};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        if (l->variant == shared[i]) return true;
    return false;
}

/* The launch that multiplies. */
static bool is_main(const fa_cuda_plan_launch *l)
{
    return !is_shared(l) && l->threads == FA_BACKWARD_SM90_THREADS;
}

static void launch(const machine *m, const fa_cuda_plan_launch *l, const parameters *params)
{
    char name[200];
    cuda_run run = {.name = name,
                    .kernel = kernels[l->variant],
                    .memory = &m->memory,
                    .parameters = params,
                    .grid = l->grid,
                    .cluster = l->cluster > 1 ? l->cluster : 0,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes,
                    .static_bytes = relies_on_static(&fa_variants[l->variant])
                                        ? 1024 - FA_BACKWARD_SM90_PADDING(1)
                                        : 0,
                    .overlaps = l->overlaps,
                    .begins_early = l->smem_bytes > 0 && !prepares(l), /* loads of keys */
                    .lets_late = l->smem_bytes == 0 || prepares(l), /* for the sake of such loads */
                    .units = &hopper_units};
    if (!run.kernel) abort();
    vary(&run, m, l);
    cleared_ahead += clears_ahead(l);
    first_stored += adds_to_first_shares(l);
    snprintf(name, sizeof name,
             "number %lld: %s, %s, %s copies, %s products, lanes %x of warp %u slow",
             (long long)m->number, fa_variants[l->variant].name,
             run.backwards ? "backwards" : "forwards", run.late_copies ? "late" : "early",
             run.late_products ? "late" : "early", run.slow_lanes, run.slow_warp);
    runs[l->variant]++;
    if (is_main(l)) {
        const bool above = fa_variants[l->variant].head_dim > 64;
        biases_by_tma[above] += l->backward_sm90.bias_mapped;
        dbias_by[above][l->backward_sm90.dbias_mapped]++;
        rooms_waited_for += waits_for_room(l);
        sums_passed_on += passes_sums_on(l);
    }
    cuda_run_kernel(&run);
}

static fa_status run_launches(const machine *m, const fa_problem *p, const fa_cuda_plan *plan,
                              char *message, size_t size)
{
    static parameters params;
    fa_cuda_fault fault;
    for (int i = 0; i < plan->count; i++) {
        const fa_cuda_plan_launch *l = &plan->launches[i];
        if (l->idle) continue;
        fa_cuda_set_backward_params(p, l, &params.backward);
        if (!is_shared(l) &&
            !fa_cuda_backward_sm90_params(p, l, hopper_encode_map, &params.more, &fault)) {
            snprintf(message, size, "a map that the planner allowed: %s", fault.text);
            return FA_ERROR_DEVICE;
        }
        launch(m, l, &params);
    }
    return FA_OK;
}

static fa_status run_in_workspace(machine *m, fa_problem *p, const fa_cuda_plan *plan,
                                  char *message, size_t size)
{
    begin_workspace(&m->memory, p, plan->workspace_bytes);
    const fa_status status = run_launches(m, p, plan, message, size);
    if (end_workspace(&m->memory, p)) return status;
    snprintf(message, size, "memory beside the workspace was written");
    return (fa_status)RANDOM_WRONG;
}

/* ---- Problems -------------------------------------------------------------------------------- */

/* Whether blocks add to it. */
static bool is_sum(const machine *m, const char *name)
{
    return (strcmp(name, "dq") == 0 && !m->chained) ||
           (strcmp(name, "dbias") == 0 && !m->leaves_ds);
}

/* The first run's outputs are kept, and the second's are compared with them. */
static fa_status compare_runs(machine *m, const random_call *call, char *message, size_t size)
{
    fa_status status = FA_OK;
    if (m->compared) return FA_OK;
    m->compared = true;
    if (!m->otherwise) {
        m->first = ref_buffers_copy(call->buffers);
        return FA_OK;
    }
    if (!m->first) abort();
    const char *first = m->first;
    for (int i = 0; i < call->buffers->count; first += call->buffers->list[i++].reserved) {
        const ref_buffer *b = &call->buffers->list[i];
        if (memcmp(first, b->base, b->reserved) == 0) continue;
        if (is_sum(m, b->name) && !m->ordered) {
            rounded_otherwise++;
            continue;
        }
        snprintf(message, size, "a second run left other bits in %s", b->name);
        status = (fa_status)RANDOM_WRONG;
    }
    return status;
}

/* The problem of backward, and its plan, if it is one for the kernel. */
static fa_status make_plan(const random_call *call, const fa_gradients *gradients,
                           fa_options *options, const fa_cuda_family *asked, fa_problem *p,
                           fa_cuda_plan *plan, char *message, size_t size)
{
    const fa_arguments a = {.pass = FA_PASS_BACKWARD,
                            .device = FA_DEVICE_CUDA,
                            .q_memory.ordinal = -1,
                            .q = &call->q,
                            .k = &call->k,
                            .v = &call->v,
                            .out = &call->out,
                            .lse = call->lse,
                            .gradients = gradients,
                            .options = options};
    const fa_status status = fa_problem_make(&a, p);
    if (status != FA_OK) {
        snprintf(message, size, "%s", fa_last_error());
        return status;
    }
    if (p->d < least_dim && p->d_v < least_dim) return FA_ERROR_UNSUPPORTED;
    p->workspace_size = SIZE_MAX; /* for sums of dbias as well */
    if (!fa_cuda_plan_make(p, &device, asked, plan, message, size)) return FA_ERROR_UNSUPPORTED;
    return plan->family == &fa_cuda_backward_sm90 || (asked && plan->family == asked)
               ? FA_OK
               : FA_ERROR_UNSUPPORTED;
}

/* Whether no two of its elements are in one place. */
static bool has_own_elements(const fa_tensor *t)
{
    for (int i = 0; i < 4; i++)
        if (t->shape[i] > 1 && t->stride[i] == 0) return false;
    return true;
}

/* Queries that see no key may hold anything, and their gradients dout. */
static void poison_blind_queries(const random_call *call)
{
    const fa_tensor *tensors[] = {&call->q, &call->gradients.dout};
    const int64_t *n = call->q.shape;
    for (int64_t row = 0; row < n[0] * n[1] * n[2]; row++) {
        const int64_t i = row % n[1], h = row / n[1] % n[2], block = row / n[1] / n[2];
        if (call->lse[row] != -INFINITY) continue;
        for (int k = 0; k < 2; k++)
            for (int64_t c = 0; c < tensors[k]->shape[3] && has_own_elements(tensors[k]); c++)
                ref_store(tensors[k], block, i, h, c, NAN);
        blind_queries++;
    }
}

/* Copies the buffers of q and dout to memory, which is allocated if `kept` is NULL, or back from
 * it. */
static void *keep_queries(const ref_buffers *buffers, char *kept)
{
    size_t bytes = 0, at = 0;
    const bool back = kept;
    for (int i = 0; i < buffers->count; i++) bytes += buffers->list[i].reserved;
    if (!kept) kept = malloc(bytes);
    if (!kept) abort();
    for (int i = 0; i < buffers->count; i++) {
        const ref_buffer *b = &buffers->list[i];
        if (strcmp(b->name, "q") != 0 && strcmp(b->name, "dout") != 0) continue;
        memcpy(back ? b->base : kept + at, back ? kept + at : b->base, b->reserved);
        at += b->reserved;
    }
    return kept;
}

/* Leaves room for one unit, the minimum for the kernel: then the blocks of each unit wait for those
 * of the previous unit. */
static void leave_little_room(fa_cuda_plan *plan)
{
    for (int i = 0; i < plan->count; i++)
        if (plan->launches[i].backward_sm90.left.units > 0)
            plan->launches[i].backward_sm90.left.room = 1;
}

/* Sequences are too short for two tiles of dQ to be counted together; half of the problems do it.
 * Problems also have few heads: with small groups of them there are several, except where the blocks
 * of a unit must follow each other. */
static void choose_turns(fa_cuda_plan *plan, int64_t number)
{
    for (int i = 0; i < plan->count; i++) {
        fa_cuda_backward_sm90_launch *own = &plan->launches[i].backward_sm90;
        own->counts_pairs = number % 2;
        own->tiles_ahead = 1 + (int32_t)(number / 2 % 4);
        own->ascending_together = 1 + number / 3 % 3;
        if (own->first_stored && !own->ordered && own->left.units == 0)
            own->heads_together = 1 + number % 3;
    }
}

/* Whether blocks take turns to add to dq: some do so where any order would do. */
static bool takes_turns(const fa_cuda_plan *plan)
{
    for (int i = 0; i < plan->count; i++) {
        const fa_cuda_plan_launch *l = &plan->launches[i];
        if (!is_shared(l) && l->backward_sm90.ordered) return true;
    }
    return false;
}

/* The options of a problem: half of the problems ask for one order of sums. */
static fa_options find_options(const machine *m, const random_call *call)
{
    fa_options options = call->options;
    if (m->number / 8 % 2 && !few) options.flags |= FA_DETERMINISTIC;
    return options;
}

/* The family that is asked for. It does not take all problems. If sums have one order, both runs have
 * the same kernel: with another one, dk and dv may be sums in another order. */
static const fa_cuda_family *find_family(const fa_options *options, bool second_run)
{
    const bool ordered = options->flags & (FA_DETERMINISTIC | FA_BATCH_INVARIANT);
    if (few) return few;
    return ordered || second_run ? &fa_cuda_backward_sm90_persistent : &fa_cuda_backward_sm90;
}

static fa_status attend(machine *m, const random_call *call, char *message, size_t size)
{
    if (m->otherwise != call->run) m->compared = false;
    m->otherwise = call->run;
    fa_options options = find_options(m, call);
    fa_problem p;
    fa_cuda_plan plan;
    const fa_cuda_family *asked = find_family(&options, m->otherwise);
    fa_status status = make_plan(call, &call->gradients, &options, asked, &p, &plan, message, size);
    if (status != FA_OK) return status;
    m->ordered = p.deterministic || p.batch_invariant || takes_turns(&plan);
    if (m->ordered && m->otherwise) ordered++;
    /* In all problems that support it. */
    fa_cuda_backward_sm90_clear_ahead(&plan, 1 + m->number % 2);
    choose_turns(&plan, m->number);
    /* `summed` is one less than units. */
    if (alone && m->otherwise) leave_little_room(&plan);
    m->leaves_ds = false;
    m->chained = plan.family == &fa_cuda_backward_sm90_chained;
    for (int i = 0; i < plan.count; i++)
        m->leaves_ds |= is_main(&plan.launches[i]) && plan.launches[i].backward_sm90.left.units > 0;
    m->memory = *call->buffers;
    char *const kept = keep_queries(call->buffers, NULL);
    poison_blind_queries(call);
    status = run_in_workspace(m, &p, &plan, message, size);
    free(keep_queries(call->buffers, kept));
    return status == FA_OK ? compare_runs(m, call, message, size) : status;
}

/* Of a chain: the number of its blocks; whether they do what `prepare` does, with rows that go through
 * the workspace, and row by row. */
static uint64_t find_chain_options(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const bool left = l->backward_sm90.q_tiles >
                      FA_BACKWARD_SM90_ROW_SLOTS(fa_variants[l->variant].head_dim, 0, 1);
    const bool by_rows = (uintptr_t)p->out.data % 16 != 0 || p->out.stride[1] % 8 != 0;
    const uint64_t blocks = 1u << l->cluster;
    return prepares(l) ? blocks << 8 | (uint64_t)left << 16 | (uint64_t)by_rows << 17 : blocks;
}

/* Additional options: how dbias is stored, and whether TMA loads the bias; whether blocks add to first
 * shares, or share the queries of a head. */
static uint64_t other_options(const fa_problem *p, const fa_cuda_plan *plan)
{
    uint64_t other = 0, first = 0;
    for (int i = 0; i < plan->count; i++) {
        const fa_cuda_plan_launch *l = &plan->launches[i];
        if (l->idle || !is_main(l)) continue;
        first |= (uint64_t)adds_to_first_shares(l) << 16;
        first |= (uint64_t)(l->backward_sm90.query_parts > 1) << 22;
        first |= (uint64_t)!l->backward_sm90.even_splits << 23;
        if (fa_variants[l->variant].chained) return find_chain_options(p, l);
        const int above = fa_variants[l->variant].head_dim > 64 ? 8 : 0;
        const bool by_itself = fa_variants[l->variant].options == FA_SM90_BIAS;
        other |= 1u << ((by_itself ? 17 : above) + l->backward_sm90.dbias_mapped);
        other |= (uint64_t)l->backward_sm90.bias_mapped << (above + 7);
        other |= (uint64_t)waits_for_room(l) << (above + 6);
        other |= (uint64_t)passes_sums_on(l) << (above + 5);
    }
    return first | (p->bias.data ? other : 0);
}

/* Decides about the first run. */
static bool wants(void *context, const random_call *call)
{
    const machine *m = context;
    char message[320];
    fa_options options = find_options(m, call);
    fa_problem p;
    fa_cuda_plan plan;
    if (call->pass != RANDOM_BACKWARD) return false;
    const fa_status status =
        make_plan(call, &call->gradients, &options, find_family(&options, false), &p, &plan,
                  message, sizeof message);
    if (status != FA_OK) return status != FA_ERROR_UNSUPPORTED; /* attend gives the reason */
    for (int i = 0; i < plan.count; i++)
        if (plan.launches[i].cluster > CUDA_MOST_CLUSTER) return false;
    if (few == &fa_cuda_backward_sm90 &&
        !fa_cuda_backward_sm90_clear_ahead(&plan, 1 + m->number % 2))
        return false;
    return (!few || plan.family == few) && sample_takes(&p, &plan, other_options(&p, &plan));
}

static fa_status compute(void *context, const random_call *given, char *message, size_t size)
{
    random_call call = *given;
    if (call.pass != RANDOM_FORWARD) return attend(context, &call, message, size);
    call.options.device = FA_DEVICE_CPU;
    const fa_status status = random_call_run(&call);
    if (status != FA_OK) snprintf(message, size, "%s", fa_last_error());
    return status;
}

static bool run_problem(machine *m)
{
    static random_result result;
    static const random_focus focuses[] = {RANDOM_ANYTHING, RANDOM_TAILS,     RANDOM_MASKS,
                                           RANDOM_UNUSED,   RANDOM_LENGTHS,   RANDOM_TAILS,
                                           RANDOM_EMPTY,    RANDOM_INVARIANCE};
    const random_settings settings = {
        .device = FA_DEVICE_CUDA,
        .tiles = true,
        .one_pass = true,
        .pass = RANDOM_BACKWARD,
        .focus = about_bias      ? RANDOM_BIAS
                 : about_lengths ? RANDOM_LENGTHS
                                 : focuses[m->number % (int64_t)(sizeof focuses / sizeof *focuses)],
        .all_passes = true,
        .backward_alone = true,
        .unseen_keys = unseen,
        .many_heads = many_heads,
        .runs = 2,
        .attend = compute,
        .wants = wants,
        .context = m};
    device = devices[H200];
    if (alone || few == &fa_cuda_backward_sm90) device.multiprocessors = 1;
    else if (m->number / 16 % 2) device.multiprocessors = few && m->number % 2 ? 1 : 3;
    random_problem_run((uint64_t)m->number, &settings, &result);
    if (result.status == FA_ERROR_UNSUPPORTED) return false;
    CHECK(result.report.ok, "number %lld, run %d: %s\n  %s", (long long)m->number, m->otherwise + 1,
          result.report.message, result.description);
    return result.report.ok;
}

static int run_problems(int64_t first, int64_t end)
{
    int done = 0;
    for (int64_t number = first; number < end; number++) {
        machine m = {.number = number};
        done += run_problem(&m);
        free(m.first);
    }
    return done;
}

/* The problems that are listed here. */
static int run_listed(void)
{
    const int done = run_problems(0, PROBLEMS);
    for (size_t i = 0; i < sizeof with_options / sizeof *with_options; i++)
        run_problems(with_options[i], with_options[i] + 1);
    for (size_t i = 0; i < sizeof with_order_at_96 / sizeof *with_order_at_96; i++)
        run_problems(with_order_at_96[i], with_order_at_96[i] + 1);
    for (size_t i = 0; i < sizeof with_shared_queries / sizeof *with_shared_queries; i++)
        run_problems(with_shared_queries[i], with_shared_queries[i] + 1);
    about_bias = true;
    for (size_t i = 0; i < sizeof with_dbias / sizeof *with_dbias; i++)
        run_problems(with_dbias[i], with_dbias[i] + 1);
    for (size_t i = 0; i < sizeof with_bias_alone / sizeof *with_bias_alone; i++)
        run_problems(with_bias_alone[i], with_bias_alone[i] + 1);
    least_dim = WIDE;
    for (size_t i = 0; i < sizeof with_wide_bias / sizeof *with_wide_bias; i++)
        run_problems(with_wide_bias[i], with_wide_bias[i] + 1);
    least_dim = 0;
    alone = true;
    for (size_t i = 0; i < sizeof with_left_ds / sizeof *with_left_ds; i++)
        run_problems(with_left_ds[i], with_left_ds[i] + 1);
    unseen = true;
    for (size_t i = 0; i < sizeof with_unseen_keys / sizeof *with_unseen_keys; i++)
        run_problems(with_unseen_keys[i], with_unseen_keys[i] + 1);
    unseen = false;
    many_heads = true;
    for (size_t i = 0; i < sizeof with_many_heads / sizeof *with_many_heads; i++)
        run_problems(with_many_heads[i], with_many_heads[i] + 1);
    about_bias = alone = many_heads = false;
    least_dim = FULL;
    run_problems(FIRST_FULL_PROBLEM, FIRST_FULL_PROBLEM + FULL_PROBLEMS);
    least_dim = WIDE;
    run_problems(FIRST_WIDE_PROBLEM, FIRST_WIDE_PROBLEM + WIDE_PROBLEMS);
    run_problems(UNUSUAL_WIDE_PROBLEM, UNUSUAL_WIDE_PROBLEM + 1);
    least_dim = 0;
    few = &fa_cuda_backward_sm90; /* only with blocks that clear sums for later ones */
    run_problems(FIRST_CLEARED_PROBLEM, FIRST_CLEARED_PROBLEM + CLEARED_PROBLEMS);
    run_problems(PACKED_KEYS_PROBLEM, PACKED_KEYS_PROBLEM + 1);
    few = &fa_cuda_backward_sm90_persistent;
    run_problems(FIRST_PERSISTENT_PROBLEM, FIRST_PERSISTENT_PROBLEM + PERSISTENT_PROBLEMS);
    about_lengths = true;
    for (size_t i = 0; i < sizeof with_empty_items / sizeof *with_empty_items; i++)
        run_problems(with_empty_items[i], with_empty_items[i] + 1);
    about_lengths = false;
    few = &fa_cuda_backward_sm90_joined;
    run_problems(FIRST_JOINED_PROBLEM, FIRST_JOINED_PROBLEM + JOINED_PROBLEMS);
    few = &fa_cuda_backward_sm90_single;
    run_problems(FIRST_SINGLE_PROBLEM, FIRST_SINGLE_PROBLEM + SINGLE_PROBLEMS);
    for (size_t i = 0; i < sizeof with_query_parts / sizeof *with_query_parts; i++)
        run_problems(with_query_parts[i], with_query_parts[i] + 1);
    few = &fa_cuda_backward_sm90_chained;
    for (size_t i = 0; i < sizeof with_chains / sizeof *with_chains; i++)
        run_problems(with_chains[i], with_chains[i] + 1);
    few = &fa_cuda_backward_sm90_rounding;
    for (size_t i = 0; i < sizeof with_rounding / sizeof *with_rounding; i++)
        run_problems(with_rounding[i], with_rounding[i] + 1);
    few = NULL;
    return done;
}

int main(int argc, char **argv)
{
    const int64_t first = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = first + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    test_begin();
    const bool searching = sample_begin(argc > 1);
    if (argc > 3) least_dim = atoll(argv[3]);
    unseen = argc > 4 && argv[4][0] == 'u';
    many_heads = argc > 4 && argv[4][0] == 'h';
    alone = argc > 4 && (argv[4][0] == 'l' || many_heads || unseen);
    about_bias = argc > 4 && (argv[4][0] == 'b' || alone);
    about_lengths = argc > 4 && argv[4][0] == 'e';
    few = argc <= 4 || about_bias ? NULL
          : argv[4][0] == 'j'     ? &fa_cuda_backward_sm90_joined
          : argv[4][0] == 's'     ? &fa_cuda_backward_sm90_single
          : argv[4][0] == 'C'     ? &fa_cuda_backward_sm90_chained
          : argv[4][0] == 'r'     ? &fa_cuda_backward_sm90_rounding
          : argv[4][0] == 'c'     ? &fa_cuda_backward_sm90
                                  : &fa_cuda_backward_sm90_persistent;
    if (searching) run_listed();
    sample_found();
    const int done = argc == 1 ? run_listed() : run_problems(first, end);
    if (argc == 1) sample_end(kernels, runs);
    for (int by = 0; by <= FA_BACKWARD_SM90_DBIAS_ADDED; by++)
        CHECK(dbias_by[0][by] + dbias_by[1][by] || argc > 1, "nobody made dbias in way %d", by);
    for (int above = 0; above < 2; above++) {
        CHECK(biases_by_tma[above] || argc > 1, "TMA loaded no bias");
        if (argc > 2)
            printf(
                "%5d biases by TMA, dbias by strides %d, stored %d, left %d, in 32 bits %d, added "
                "%d\n",
                biases_by_tma[above], dbias_by[above][0], dbias_by[above][1], dbias_by[above][2],
                dbias_by[above][3], dbias_by[above][4]);
    }
    CHECK(rooms_waited_for || argc > 1, "no block waited for room");
    CHECK(sums_passed_on || argc > 1, "no unit passed sums of dbias on");
    CHECK(blind_queries || argc > 1, "all queries saw keys");
    CHECK(cleared_ahead || argc > 1, "no block cleared sums for later ones");
    CHECK(first_stored || argc > 1, "no block added to first shares in any order");
    CHECK(rounded_otherwise || argc > 1, "no sum of dq depended on the order");
    if (argc > 2) {
        printf(
            "%5d problems, %d with another rounding of dq, %d with one order of its sums, %d with "
            "sums cleared ahead, %d first shares stored, %lld queries that saw nothing\n",
            done, rounded_otherwise, ordered, cleared_ahead, first_stored,
            (long long)blind_queries);
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    }
    return test_end();
}
