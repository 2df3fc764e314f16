/*
 * The forward kernels for Hopper, run on the host (cuda_on_cpu.h, hopper_units.h): random problems
 * from the whole option space, compared with float64. The launch is the one that the planner and
 * the backend make for an H200; only the tensor maps are this machine's. Problems that the planner
 * gives to another family are left out.
 *
 * Each call runs twice, with different orders of the threads, delays and numbers of blocks. The
 * bits must be the same.
 *
 * Peaked rows have their own problems, which also use every path through the softmax.
 *
 * Each variant runs a few times. Arguments: the first problem's number, and how many; then all of
 * them run, and the runs of each variant are printed. If the name of a family of float32 inputs
 * follows, only its problems run.
 */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "caller_memory.h"
#include "check.h"
#include "cuda/family.h"
#include "cuda/plan_rounded.h"
#include "cuda/plan_sm90.h"
#include "cuda/plan_split_float32.h"
#include "float32_on_cpu.h"
#include "forward_on_cpu.h"
#include "hopper_units.h"
#include "wild_pages.h"

enum {
    PROBLEMS = 1800,
    WIDE_PROBLEMS = 60,
    PAGED_PROBLEMS = 200,
    FLOAT32_PROBLEMS = 120,
    PEAKED_PROBLEMS = 52,
    EACH = 5,
    EACH_OF_SAMPLE = 2,
    LONG_ROWS = 8192,
    MAX_SHUFFLES = 200000,
    MAX_BLOCKS = 132
};

/* Rare problems: those with a bias alone, which have their own variant. */
static const int64_t rare[] = {2833, 12644};

/* Peaked rows together with flat ones: those after the last query, or those of other queries. */
static const int64_t beside_flat[] = {64, 78, 143, 168, 589, 715};

/* The variants, one FORM(name) each: the build writes them. */
typedef struct parameters {
    fa_attention_params attention;
    fa_sm90_params more;
} parameters;

#define FORM(name)                                                                                 \
    void name(fa_attention_params p, fa_sm90_params s);                                            \
    static void run_##name(const void *p)                                                          \
    {                                                                                              \
        const parameters *both = p;                                                                \
        name(both->attention, both->more);                                                         \
    }
#include "test_sm90_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_sm90_on_cpu_forms.h"
};

static const char *family_name = "sm90";
static int runs[FA_VARIANTS], max_runs = INT_MAX;
static int dynamic;            /* runs with the dynamic schedule, in kernels that have it */
static int64_t fewest_queries; /* of a sequence that is computed; the others are another launch's */

/* Rows that are recomputed key by key take a shuffle for each product, which is slow here. */
static bool takes_long(const fa_problem *p)
{
    const double shuffles =
        (double)(p->batch * p->heads_q) * (double)(p->rows_q * p->n_k) * (double)(p->d_v / 32 + 1);
    return (p->bias.data || p->mask.data) && shuffles > MAX_SHUFFLES;
}

/* The state of a call to the kernel. */
typedef struct attempt {
    int64_t number;
    fa_cuda_plan plan;
    parameters parameters;
} attempt;

/* The launch that computes attention: others round its inputs, or merge its results. */
static const fa_cuda_plan_launch *main_launch(const attempt *a)
{
    return &a->plan.launches[a->plan.family == &fa_cuda_forward_tf32_rounded ? 2 : 0];
}

/* All orders and delays, with all numbers of blocks, for each focus. */
static void vary(cuda_run *run, const attempt *a, bool otherwise)
{
    const int64_t number = a->number;
    const uint64_t bits = (uint64_t)number * 0x9E3779B97F4A7C15u;
    const unsigned delays = (unsigned)(bits >> 61), varied = otherwise ? ~delays : delays;
    const unsigned few = (unsigned)(number % 3) + 1;
    run->backwards = varied & 1;
    run->late_copies = varied & 2;
    run->late_products = varied & 4;
    const fa_cuda_plan_launch *l = main_launch(a);
    const unsigned cluster = cuda_cluster_size(run), clusters = l->grid / cluster;
    const unsigned many = MAX_BLOCKS / cluster;
    run->grid = (clusters < few ? clusters : few) * cluster;
    if (otherwise) run->grid = (l->tasks < many ? (unsigned)l->tasks : many) * cluster;
}

/* A slow warp, often one of the three that load or schedule; all of it, its leader, all others, or
 * any lanes. */
static void slow_down(cuda_run *run, int64_t number)
{
    const uint64_t bits = (uint64_t)number * 0xD1B54A32D192ED03u;
    const uint32_t lanes[] = {~0u, 1, ~1u, (uint32_t)(bits >> 24)};
    const unsigned warps = run->threads / 32 * cuda_cluster_size(run);
    const unsigned any = (unsigned)(bits >> 50 & 1023) % warps;
    run->slow_warp = bits >> 60 < 9 ? (unsigned)(bits >> 60) % 3 : any;
    run->slow_lanes = lanes[bits >> 40 & 3];
}

static void run_once(const attempt *a, const random_call *call, bool otherwise)
{
    char name[160];
    cuda_run run = make_run(call, &a->parameters.attention, &a->plan, a->number);
    run.kernel = kernels[a->plan.launches[0].variant];
    run.parameters = &a->parameters;
    run.units = &hopper_units;
    run.cluster = a->plan.launches[0].cluster;
    run.beside = fa_variants[a->plan.launches[0].variant].beside;
    run.overlaps = a->plan.launches[0].overlaps && !run.beside;
    vary(&run, a, otherwise);
    if (otherwise) slow_down(&run, a->number);
    snprintf(name, sizeof name,
             "number %lld: %s, %u blocks, %s, %s copies, %s products, lanes %x of warp %u slow",
             (long long)a->number, fa_variants[a->plan.launches[0].variant].name, run.grid,
             run.backwards ? "backwards" : "forwards", run.late_copies ? "late" : "early",
             run.late_products ? "late" : "early", run.slow_lanes, run.slow_warp);
    run.name = name;
    cuda_run_kernel(&run);
}

/* The second parameter of launch i of split keys, or of inputs that are rounded. */
static void make_more(const attempt *a, const fa_problem *p, int i, fa_sm90_params *more)
{
    fa_cuda_fault fault;
    const fa_cuda_plan_launch *l = &a->plan.launches[i];
    const bool rounded = a->plan.family == &fa_cuda_forward_tf32_rounded;
    if (i == 1 && !rounded) fa_cuda_merge_float32_params(p, l, more);
    else
        CHECK((rounded ? fa_cuda_rounded_params
                       : fa_cuda_split_float32_params)(p, l, hopper_encode_map, more, &fault),
              "no map: %s", fault.text);
}

/* The launches of split keys, or of inputs that are rounded. False if memory outside the workspace was written. */
static bool run_parts(attempt *a, const random_call *call, fa_problem *p, bool otherwise)
{
    ref_buffers memory = *call->buffers;
    begin_workspace(&memory, p, a->plan.workspace_bytes);
    for (int i = 0; i < a->plan.count; i++) {
        char name[160];
        parameters both;
        const fa_cuda_plan_launch *l = &a->plan.launches[i];
        memset(&both, POISON, sizeof both);
        fa_cuda_set_params(p, l, &both.attention);
        make_more(a, p, i, &both.more);
        cuda_run run = {.name = name,
                        .kernel = kernels[l->variant],
                        .memory = &memory,
                        .parameters = &both,
                        .units = &hopper_units,
                        .cluster = l->cluster,
                        .overlaps = l->overlaps,
                        .grid = l->grid,
                        .threads = l->threads,
                        .smem_bytes = l->smem_bytes};
        if (l == main_launch(a)) vary(&run, a, otherwise);
        if (l == main_launch(a) && otherwise) slow_down(&run, a->number);
        snprintf(name, sizeof name, "number %lld: %s, %d parts of %d tiles, %d whole, %u blocks",
                 (long long)a->number, fa_variants[l->variant].name, (int)l->sm90.split.parts,
                 (int)l->sm90.split.part_tiles, (int)l->sm90.split.first_task[0], run.grid);
        cuda_run_kernel(&run);
    }
    return end_workspace(&memory, p);
}

/* Runs a second time in the other way, which must give the same bits. */
static fa_status run_parts_twice(attempt *a, const random_call *call, fa_problem *p, char *message,
                                 size_t size)
{
    char *before = ref_buffers_copy(call->buffers);
    bool clean = run_parts(a, call, p, false);
    char *first = ref_buffers_copy(call->buffers);
    ref_buffers_put(call->buffers, before);
    clean &= run_parts(a, call, p, true);
    const bool same = ref_buffers_are(call->buffers, first);
    free(before), free(first);
    return random_status_of_runs(clean, same, message, size);
}

static fa_status run_twice(const attempt *a, const random_call *call, char *message, size_t size)
{
    char *before = ref_buffers_copy(call->buffers);
    run_once(a, call, false);
    char *first = ref_buffers_copy(call->buffers);
    ref_buffers_put(call->buffers, before);
    run_once(a, call, true);
    const bool same = ref_buffers_are(call->buffers, first);
    if (!same) snprintf(message, size, "a second run left other bits");
    free(before);
    free(first);
    return same ? FA_OK : (fa_status)RANDOM_WRONG;
}

/* An H200 with so few multiprocessors that each block has several work tiles. */
static fa_cuda_device small_device(int64_t number)
{
    fa_cuda_device device = devices[H200];
    device.multiprocessors = (int)(number % 3) + 1;
    return device;
}

/* Some variants are for rows of so many queries that a test would take too long. They replace the
 * variant that the planner chooses, if they have run less often. */
static void plan_as_longer(const fa_cuda_family *family, const fa_problem *p, attempt *a)
{
    fa_problem longer = *p;
    fa_cuda_plan plan;
    longer.rows_q += LONG_ROWS;
    if (!fa_cuda_plan_make(&longer, &devices[H200], family, &plan, NULL, 0)) return;
    const fa_cuda_plan_launch *other = &plan.launches[0];
    fa_cuda_plan_launch *l = &a->plan.launches[0];
    const uint32_t grid = l->grid;
    if (runs[other->variant] >= runs[l->variant]) return;
    if (other->tile_k != l->tile_k || other->cluster != l->cluster)
        return; /* the maps are for tiles of this many keys */
    l->variant = other->variant;
    l->threads = other->threads;
    l->smem_bytes = other->smem_bytes;
    fa_cuda_set_query_tasks(p, other->tile_q, l);
    if (l->grid > grid) l->grid = grid;
}

/* The same kernel for a launch that runs at the same time as another one, as in a mixed batch: it
 * has the same numbers. */
static void plan_beside(attempt *a)
{
    fa_cuda_plan_launch *l = &a->plan.launches[0];
    const int other =
        l->variant == FA_VARIANT_forward_sm90_d128_f16    ? FA_VARIANT_forward_sm90_d128_beside_f16
        : l->variant == FA_VARIANT_forward_sm90_d128_bf16 ? FA_VARIANT_forward_sm90_d128_beside_bf16
                                                          : l->variant;
    if (runs[other] < runs[l->variant]) l->variant = other;
}

/* Split keys of float32: no query tile has all of its keys, or some have, and parts have one to three key tiles, or as many as the
 * planner chooses. */
static bool plan_parts(const fa_cuda_family *family, const fa_cuda_device *device,
                       const fa_problem *p, attempt *a, char *why, size_t size)
{
    fa_cuda_plan_begin(device, family, &a->plan);
    if (!family->plan(p, device, &a->plan, why, size)) return false;
    if (family == &fa_cuda_forward_tf32_rounded) return true;
    const fa_sm90_split *split = &a->plan.launches[0].sm90.split;
    const int64_t part_tiles = a->number / 3 % 4, tiles = split->part_tiles * split->parts;
    const int64_t work_tiles = a->plan.launches[0].tasks, whole = a->number / 2 % 3;
    if (part_tiles > 0 && tiles <= part_tiles * FA_SM90_PARTS)
        fa_cuda_cut_split_float32(p, device, whole < work_tiles ? whole : 0, part_tiles, &a->plan);
    return true;
}

/* Whether the problem is one for the kernel. */
static bool plan_call(const fa_problem *p, attempt *a, char *why, size_t size)
{
    const fa_cuda_family *family = fa_cuda_find_family(family_name);
    const fa_cuda_device device = small_device(a->number);
    if (family->does_few) return plan_parts(family, &device, p, a, why, size);
    if (!fa_cuda_plan_make(p, &device, family, &a->plan, why, size)) return false;
    /* An item alone must have the variant that the batch has. */
    if (p->batch_invariant) return true;
    plan_as_longer(family, p, a);
    plan_beside(a);
    return true;
}

/* Whether it also does not take long, and its variant has not run often enough. */
static bool wants(void *context, const random_call *call)
{
    char message[320];
    fa_problem p;
    attempt a = {.number = *(const int64_t *)context};
    /* attend gives the reason. */
    if (make_forward(call, &p, message, sizeof message) != FA_OK) return true;
    return plan_call(&p, &a, NULL, 0) && !takes_long(&p) &&
           runs[main_launch(&a)->variant] < max_runs && sample_takes(&p, &a.plan, other_options);
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_fault fault;
    attempt a = {.number = *(const int64_t *)context};
    const fa_status status = make_forward(call, &p, message, size);
    if (status != FA_OK) return status;
    if (!plan_call(&p, &a, message, size)) return FA_ERROR_UNSUPPORTED;
    const fa_cuda_plan_launch *l = main_launch(&a);
    if (l->tasks == 0) return FA_OK;
    if (!kernels[l->variant]) {
        snprintf(message, size, "no kernel %s", fa_variants[l->variant].name);
        return FA_ERROR_DEVICE;
    }
    runs[l->variant]++;
    if (a.plan.count > 1) {
        for (int i = 0; i < a.plan.count; i++)
            if (&a.plan.launches[i] != l) runs[a.plan.launches[i].variant]++;
        return run_parts_twice(&a, call, &p, message, size);
    }
    a.plan.launches[0].fewest_queries = fewest_queries;
    fa_cuda_set_params(&p, l, &a.parameters.attention);
    if (!fa_cuda_sm90_params(&p, l, hopper_encode_map, &a.parameters.more, &fault)) {
        snprintf(message, size, "a map that the planner allowed: %s", fault.text);
        return FA_ERROR_DEVICE;
    }
    /* The dynamic schedule is also used if the planner does not choose it; kernels without it
     * ignore the counter. */
    if (l->sm90.dynamic || (a.number % 2 && a.parameters.more.task_kind == FA_SM90_WORK_TILES)) {
        a.parameters.more.counter = (int32_t)(a.number % FA_SM90_COUNTERS);
        dynamic++;
    }
    return run_twice(&a, call, message, size);
}

/* What is too rare in other problems: wide head dims, pages of few rows. */
static int run_focused_problems(random_settings *settings, random_focus focus, int64_t *number,
                                int64_t end)
{
    static random_result result;
    int done = 0;
    settings->focus = focus;
    for (; *number < end; ++*number) {
        random_problem_run((uint64_t)*number, settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED) continue;
        done++;
        CHECK(result.report.ok, "%s number %lld: %s\n  %s", focus == RANDOM_WIDE ? "wide" : "paged",
              (long long)*number, result.report.message, result.description);
    }
    return done;
}

/* float32 inputs, for one of the families that take them. */
static void run_float32_problems(random_settings settings, const char *family,
                                 fa_precision precision, int64_t *number, int64_t count)
{
    const int64_t first = *number;
    family_name = family;
    settings.one_dtype = settings.few_queries = settings.small = true;
    settings.dtype = FA_FLOAT32;
    settings.precision = precision;
    const int done = run_forward_problems(&settings, number, first + count);
    CHECK(done > 0 || sample.searching, "no float32 problem was for these kernels");
    *number = first;
    run_peaked_problems(&settings, number, first + count / 10);
    *number = first;
    CHECK(run_focused_problems(&settings, RANDOM_WIDE, number, first + count / 8) > 0 ||
              sample.searching || strstr(family, "split"),
          "no wide problem");
    family_name = "sm90";
}

/* Rows of a tile, one of which is so much larger than the others that float16 parts have no bits
 * for them: they are computed in float32. */
static void test_wide_range(int64_t d)
{
    static const double factors[] = {0x1p-30, 1e5, 1e9};
    for (size_t n = 0; n < sizeof factors / sizeof *factors; n++) {
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        make_aligned(&a, 11 + n, s, FA_FLOAT32);
        multiply_row(&a.in.k, 70, factors[n]);
        multiply_row(&a.in.v, 150, factors[n]);
        check_exactness(attend, &a, 2, "a wide range", factors[n]);
        attention_free(&a);
    }
}

/* Tiles of very different magnitude, whose powers of two cannot be guessed from the previous
 * tiles. */
static void test_magnitudes(int64_t d)
{
    static const double factors[] = {0x1p60, 0x1p-60};
    for (size_t n = 0; n < sizeof factors / sizeof *factors; n++) {
        attention a;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        make_aligned(&a, 21 + n, s, FA_FLOAT32);
        for (int64_t i = 0; i < QUERIES; i++) multiply_row(&a.in.q, i, factors[n]);
        for (int64_t j = 0; j < KEYS; j++) {
            multiply_row(&a.in.k, j, (j / 64 % 2 ? 1 : 0x1p-20) / factors[n]);
            multiply_row(&a.in.v, j, (j / 64 % 3 ? 1 : 0x1p12) * factors[n]);
        }
        check_exactness(attend, &a, 1, "values times", factors[n]);
        attention_free(&a);
    }
}

/* Inputs that are rounded first: by a power of two for the head, or, where one row is too large for any, in
 * float32. Errors relative to the largest value are those of tf32. */
static void test_units(int64_t d)
{
    static const double factors[][3] = {
        {1, 1, 1}, {0x1p60, 0x1p-60, 0x1p-70}, {0x1p-40, 0x1p40, 0x1p90}, {1, 0x1p-12, 0x1p12}};
    enum { KINDS = sizeof factors / sizeof *factors, LARGE_ROWS = 2 };
    for (int n = 0; n < KINDS * LARGE_ROWS; n++) {
        attention a;
        ref_array want, lse;
        const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
        const double *factor = factors[n % KINDS];
        make_aligned(&a, (uint64_t)(61 + n), s, FA_FLOAT32);
        a.in.options.flags = FA_CAUSAL;
        for (int64_t i = 0; i < QUERIES; i++) multiply_row(&a.in.q, i, factor[0]);
        for (int64_t j = 0; j < KEYS; j++) {
            multiply_row(&a.in.k, j, factor[1]);
            multiply_row(&a.in.v, j, factor[2]);
        }
        if (n >= KINDS) { /* which the last query sees */
            multiply_row(&a.in.k, KEYS - 1, 0x1p30);
            multiply_row(&a.in.v, KEYS - 1, 0x1p30);
        }
        run_float32(attend, &a, FA_PRECISION_TF32);
        ref_forward(&a.in, &want, &lse);
        for (int64_t i = 0; i < QUERIES; i++)
            for (int64_t c = 0; c < d; c++) {
                const double exact = want.value[ref_array_index(&want, 0, i, 0, c)],
                             error = fabs(load(&a.out, i, c) - exact),
                             size = fmax(factor[2], fabs(exact));
                CHECK(error < 2e-3 * size, "d %lld, kind %d, query %lld: %g, expected %g",
                      (long long)d, n, (long long)i, load(&a.out, i, c), exact);
            }
        ref_array_free(&want);
        ref_array_free(&lse);
        attention_free(&a);
    }
}

/* A row that sees one key returns its values, rounded to tf32: to the nearest, ties to even. */
static void test_rounding(int64_t d)
{
    attention a;
    const shape s = {1, 1, 1, QUERIES, QUERIES, d, d};
    make_aligned(&a, 41, s, FA_FLOAT32);
    a.in.options.flags = FA_WINDOW;
    a.in.options.window_left = a.in.options.window_right = 0;
    uint32_t *bits = a.in.v.data;
    for (int64_t i = 0; i < QUERIES * d; i++)
        bits[i] = (bits[i] & ~0x3fffu) | ((uint32_t)i * 0x800u & 0x3fffu);
    run_float32(attend, &a, FA_PRECISION_TF32);
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t c = 0; c < d; c++) {
            const double v = load(&a.in.v, i, c), last = ldexp(1, ilogb(v) - 10);
            const double error = load(&a.out, i, c) - last * nearbyint(v / last);
            CHECK(fabs(error) < (d > 256 ? 2e-2 : 1e-3) * last, "row %lld, column %lld: %a of %a",
                  (long long)i, (long long)c, load(&a.out, i, c), v);
        }
    attention_free(&a);
}

/* Rows after the last query have equal scores, whose sums are beyond the bound of sums, and which are in the range of a softcap's
 * series all the same: nothing is recomputed, by the short series, and by the long one (lse). */
static void test_equal_scores(int64_t d, bool lse)
{
    attention a;
    const shape s = {1, 1, 1, 150, 700, d, d};
    make_aligned(&a, 51, s, FA_BFLOAT16);
    a.in.options.softcap = 30;
    random_call call = forward_call(&a);
    if (!lse) call.lse = NULL;
    memset(hopper_paths, 0, sizeof hopper_paths);
    check_attends(attend, 1, &call);
    CHECK(hopper_paths[HOPPER_RENEWED] > 0, "head dim %lld: no sum was beyond its bound",
          (long long)d);
    CHECK(hopper_paths[HOPPER_RECOMPUTED] == 0, "head dim %lld: scores were recomputed",
          (long long)d);
    attention_free(&a);
}

/* A softcap's series and scores that they are not for: of rows whose scores are all low, or all -infinity; a few large ones among
 * others; a softcap so large that these kernels do not take it, and a scale so small that a coefficient is 0; rows whose largest score is
 * below the series' range, with a softcap that leaves their weights large; a softcap so small that a coefficient overflows; logits as large
 * as the softcap, and so much larger that e^2x would overflow, also in one query alone. With a window, whose first key tile some rows do
 * not see, and without; with a log-sum-exp, where the short series is not used, and without. */
static void test_softcap_range(int64_t d, bool window, bool with_lse)
{
    enum {
        LOW,
        INFINITE,
        PEAKED,
        HUGE_CAP,
        MIXED,
        SMALL_SCALE,
        ALL_LOW,
        ZERO,
        LARGE,
        IMMENSE,
        KINDS
    };
    for (int kind = LOW; kind < KINDS; kind++) {
        attention a;
        ref_array want, lse;
        const shape s = {1, 2, 1, 200, 300, d, d};
        make_aligned(&a, (uint64_t)(7 * kind + window), s, kind % 2 ? FA_BFLOAT16 : FA_FLOAT16);
        a.in.options.flags = FA_CAUSAL | (window ? FA_WINDOW : 0);
        if (window) a.in.options.window_left = 50;
        a.in.options.softcap = kind == HUGE_CAP                         ? 1e12f
                               : kind == SMALL_SCALE || kind == ALL_LOW ? 250
                               : kind == ZERO                           ? 1e-12f
                                                                        : 30;
        if (kind == SMALL_SCALE) {
            a.in.options.flags |= FA_SCALE;
            a.in.options.scale = 1e-5f;
        }
        for (int64_t i = 0; i < s.n_q; i++)
            for (int64_t h = 0; h < s.heads_q; h++) {
                const bool rare = kind == MIXED ? i % 7 == 3
                                  : kind == IMMENSE
                                      ? i % 50 == 20
                                      : kind >= ALL_LOW || (kind <= PEAKED && i % 5 < 2);
                if (!rare) continue;
                for (int64_t c = 0; c < d; c++) {
                    const double x = ref_load(&a.in.q, 0, i, h, c);
                    ref_store(&a.in.q, 0, i, h, c,
                              kind == LOW        ? (c == 0 ? -20 * sqrt((double)d) : 0)
                              : kind == ALL_LOW  ? (c == 0 ? -173 * sqrt((double)d) : 3 * x)
                              : kind == ZERO     ? 0
                              : kind == INFINITE ? (c == 0 ? -1e38 : 0)
                              : kind == LARGE    ? x * 30
                              : kind == IMMENSE  ? x * 4000
                                                 : x * 9);
                }
            }
        const bool equal = kind == ALL_LOW || (kind <= MIXED && kind != PEAKED && kind != HUGE_CAP);
        for (int64_t j = 0; j < s.n_k && equal; j++)
            ref_store(&a.in.k, 0, j, 0, 0, kind == INFINITE ? 100 : 1);
        ref_forward(&a.in, &want, &lse);
        random_call call = forward_call(&a);
        if (!with_lse) call.lse = NULL;
        check_attends(attend, 1, &call);
        for (int64_t h = 0; h < s.heads_q; h++)
            for (int64_t i = 0; i < s.n_q; i++) {
                for (int64_t c = 0; c < d; c++) {
                    const double x = ref_load(&a.out, 0, i, h, c),
                                 y = want.value[ref_array_index(&want, 0, i, h, c)];
                    CHECK(fabs(x - y) < (kind == ALL_LOW ? 0.004 : 0.03),
                          "kind %d, dim %lld, window %d, head %lld, query %lld, column %lld: %g, "
                          "expected %g",
                          kind, (long long)d, window, (long long)h, (long long)i, (long long)c, x,
                          y);
                }
                const double x = a.lse[h * s.n_q + i],
                             y = lse.value[ref_array_index(&lse, 0, h, i, 0)];
                CHECK(!with_lse || kind == INFINITE ||
                          fabs(x - y) < 1e-5 * (double)a.in.options.softcap + 1e-5 * fabs(y),
                      "kind %d, dim %lld, window %d, head %lld, query %lld: lse %g, expected %g",
                      kind, (long long)d, window, (long long)h, (long long)i, x, y);
            }
        ref_array_free(&want);
        ref_array_free(&lse);
        attention_free(&a);
    }
}

/* TMA gives zeros in place of a page that is not in the cache. */
static void test_wild_tables(void)
{
    test_wild_pages(attend, &(int64_t){1}, FA_FLOAT16, false);
    test_wild_pages(attend, &(int64_t){2}, FA_BFLOAT16, false);
    family_name = "f16x3_sm90";
    test_wild_pages(attend, &(int64_t){1}, FA_FLOAT32, false);
    family_name = "sm90";
}

/* More packed sequences than three warps have lanes, most of them empty or of one query, which another launch may have. */
static void test_many_sequences(int64_t number)
{
    enum { COUNT = 100, LONG = 150, EVERY = 40, FIRST = 7 };
    static int32_t cu_q[COUNT + 1], cu_k[COUNT + 1];
    attention a;
    ref_array want, lse;
    for (int i = 0; i < COUNT; i++) {
        const bool is_long = i % EVERY == FIRST;
        cu_q[i + 1] = cu_q[i] + (is_long ? LONG : i % 3 == 1);
        cu_k[i + 1] = cu_k[i] + (is_long ? LONG + i : 2 + i % 5 * 3);
    }
    const shape s = {1, 4, 2, cu_q[COUNT] + 3, cu_k[COUNT] + 9, 128, 128};
    make_aligned(&a, 5, s, FA_BFLOAT16);
    a.in.options.flags = number % 4 < 2 ? FA_CAUSAL : 0;
    a.in.options.cu_seqlens_q = cu_q;
    a.in.options.cu_seqlens_k = cu_k;
    a.in.options.num_sequences = COUNT;
    a.in.options.max_seqlen_q = LONG;
    a.in.options.max_seqlen_k = LONG + COUNT;
    ref_forward(&a.in, &want, &lse);
    fewest_queries = number % 3 ? 2 : 0;
    const random_call call = forward_call(&a);
    check_attends(attend, number, &call);
    for (int n = 0; n < COUNT; n++)
        for (int64_t i = cu_q[n]; i < cu_q[n + 1]; i++)
            for (int64_t h = 0; h < s.heads_q && cu_q[n + 1] - cu_q[n] >= fewest_queries; h++) {
                const double x = ref_load(&a.out, 0, i, h, 5),
                             y = want.value[ref_array_index(&want, 0, i, h, 5)];
                CHECK(fabs(x - y) < 0.02, "number %lld, row %lld, head %lld: %g, expected %g",
                      (long long)number, (long long)i, (long long)h, x, y);
            }
    fewest_queries = 0;
    ref_array_free(&want);
    ref_array_free(&lse);
    attention_free(&a);
}

static void test_tf32(void)
{
    family_name = "tf32_sm90";
    test_rounding(64);
    test_infinities(attend, FA_PRECISION_TF32, 64);
    test_nan_key(attend, FA_PRECISION_TF32, 64);
    test_hidden_keys(attend, FA_PRECISION_TF32, 64);
    test_large_bias(attend, FA_PRECISION_TF32, 64);
    hopper_cuts_off = true;
    test_infinities(attend, FA_PRECISION_TF32, 320); /* high parts, in clusters */
    test_nan_key(attend, FA_PRECISION_TF32, 512);
    test_large_bias(attend, FA_PRECISION_TF32, 512);
    hopper_cuts_off = false;
    family_name = "tf32_rounded";
    test_rounding(320);
    test_units(128);
    test_units(256);
    test_units(384);
    test_units(512);
    test_infinities(attend, FA_PRECISION_TF32, 320);
    test_nan_key(attend, FA_PRECISION_TF32, 512);
    family_name = "sm90";
}

/* Both blocks of a cluster have exactly the same weights. So if the left half of the values equals
 * the right one, the same holds for the outputs. */
static void test_equal_halves(int64_t d)
{
    attention a;
    const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
    make_aligned(&a, 91, s, FA_FLOAT32);
    peak_queries(&a, 16);
    for (int64_t j = 0; j < KEYS; j++)
        for (int64_t c = 0; c < d / 2; c++)
            ref_store(&a.in.v, 0, j, 0, d / 2 + c, load(&a.in.v, j, c));
    run_float32(attend, &a, FA_PRECISION_FLOAT32);
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t c = 0; c < d / 2; c++)
            CHECK(load(&a.out, i, c) == load(&a.out, i, d / 2 + c),
                  "d %lld, query %lld, column %lld: %a and %a", (long long)d, (long long)i,
                  (long long)c, load(&a.out, i, c), load(&a.out, i, d / 2 + c));
    attention_free(&a);
}

/* Heads whose columns two blocks share: infinities and NaN are in those of either block. */
static void test_f16x3_clusters(void)
{
    test_infinities(attend, FA_PRECISION_FLOAT32, 288);
    test_infinities(attend, FA_PRECISION_FLOAT32, 320);
    test_nan_key(attend, FA_PRECISION_FLOAT32, 512);
    test_equal_halves(288);
    test_equal_halves(320);
    test_equal_halves(384);
    test_equal_halves(512);
    test_exactness(attend, 512);
    test_magnitudes(512);
    test_exact_options(attend, 512);
    test_hidden_keys(attend, FA_PRECISION_FLOAT32, 512);
}

static void test_f16x3(void)
{
    family_name = "f16x3_sm90";
    for (int n = 0; n < 4; n++) test_small_weights(attend, n % 2, n / 2);
    hopper_cuts_off = true;
    for (int d = 64; d <= 256; d *= 2) {
        test_exactness(attend, d);
        test_exact_options(attend, d);
    }
    test_hidden_keys(attend, FA_PRECISION_FLOAT32, 64);
    test_large_bias(attend, FA_PRECISION_FLOAT32, 64);
    test_scales(attend, 64);
    test_wide_range(64);
    test_magnitudes(128);
    test_huge_logits(attend, 64);
    test_infinities(attend, FA_PRECISION_FLOAT32, 64);
    test_nan_key(attend, FA_PRECISION_FLOAT32, 64);
    test_f16x3_clusters();
    hopper_cuts_off = false;
    family_name = "sm90";
}

/* A part whose weights are 0 beside those of the last keys, and whose values are immense: it adds nothing. */
static void test_parts_of_no_weight(fa_precision precision, int64_t d)
{
    attention a;
    const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
    make_aligned(&a, 81, s, FA_FLOAT32);
    for (int64_t i = 0; i < QUERIES; i++) ref_store(&a.in.q, 0, i, 0, 0, 40);
    for (int64_t j = 0; j < KEYS - 64; j++) {
        ref_store(&a.in.k, 0, j, 0, 0, -64);
        multiply_row(&a.in.v, j, 0x1p118);
    }
    CHECK(compare_with_cpu(attend, &a, precision, "a part of no weight") == 0, "NaN");
    attention_free(&a);
}

/* A logit so large that its rounded base differs from it by some thousands: the sum of weights of its part is infinite, or 0. */
static void test_infinite_sums(fa_precision precision, int64_t d)
{
    enum { LARGEST = 200 };
    attention a;
    const shape s = {1, 1, 1, QUERIES, KEYS, d, d};
    make_aligned(&a, 83, s, FA_FLOAT32);
    for (int64_t i = 0; i < QUERIES; i++)
        ref_store(&a.in.q, 0, i, 0, 0, 0x1p24 * (1 + (double)i / 64));
    for (int64_t j = 0; j < KEYS; j++) ref_store(&a.in.k, 0, j, 0, 0, j == LARGEST ? 0x1p14 : 0);
    CHECK(compare_with_cpu(attend, &a, precision, "infinite sums") == 0, "NaN");
    attention_free(&a);
}

/* The same with split keys. */
static void test_parts(void)
{
    family_name = "tf32_split";
    test_hidden_keys(attend, FA_PRECISION_TF32, 64);
    test_large_bias(attend, FA_PRECISION_TF32, 64);
    test_parts_of_no_weight(FA_PRECISION_TF32, 64);
    test_infinite_sums(FA_PRECISION_TF32, 64);
    family_name = "f16x3_split";
    test_parts_of_no_weight(FA_PRECISION_FLOAT32, 128);
    test_infinite_sums(FA_PRECISION_FLOAT32, 64);
    hopper_cuts_off = true;
    test_exactness(attend, 64);
    test_exactness(attend, 192);
    test_exact_options(attend, 128);
    test_exact_options(attend, 384);
    test_hidden_keys(attend, FA_PRECISION_FLOAT32, 64);
    test_large_bias(attend, FA_PRECISION_FLOAT32, 64);
    test_huge_logits(attend, 64);
    test_infinities(attend, FA_PRECISION_FLOAT32, 64);
    test_infinities(attend, FA_PRECISION_FLOAT32, 320);
    hopper_cuts_off = false;
    family_name = "sm90";
}

/* Whether tiles used every path through the softmax; print: prints how many. */
static void check_paths(bool print)
{
    static const char *const names[HOPPER_PATHS] = {
        [HOPPER_UNTRACKED] = "without the max",
        [HOPPER_TRACKED] = "with the max",
        [HOPPER_TRACKING_ENDED] = "no new max for a while",
        [HOPPER_RENEWED] = "bases renewed",
        [HOPPER_RECOMPUTED] = "immense: scores recomputed"};
    for (int i = 0; i < HOPPER_PATHS; i++) {
        if (print) printf("%8lld warps' tiles: %s\n", (long long)hopper_paths[i], names[i]);
        else CHECK(hopper_paths[i] > 0, "no tile went this way: %s", names[i]);
    }
}

static bool every_path_used(void)
{
    for (int i = 0; i < HOPPER_PATHS; i++)
        if (!hopper_paths[i]) return false;
    return true;
}

/* Peaked problems until tiles have used every path, those left out of the sample among them: which
 * path a tile uses is only known once it has run. */
static void run_until_every_path_used(const random_settings *settings, int64_t *number, int64_t end)
{
    sample.whole = true;
    for (int64_t i = 0; i < end && !every_path_used(); i++) {
        *number = i;
        run_peaked_problems(settings, number, i + 1);
    }
    sample.whole = false;
}

static void print_runs(void)
{
    for (int i = 0; i < FA_VARIANTS; i++)
        if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
}

/* Problems from a number on of each kind. count: how many; 0: those that are listed here. Returns
 * the number of problems of 16-bit types for these kernels. */
static int run_problems(random_settings settings, int64_t *number, int64_t begin, int64_t count)
{
    const bool listed = count == 0;
    *number = begin;
    if (listed) max_runs = sample.whole ? EACH : EACH_OF_SAMPLE;
    int done = run_forward_problems(&settings, number, begin + (listed ? PROBLEMS : count));
    for (size_t i = 0; i < sizeof rare / sizeof rare[0] && listed; i++) {
        *number = rare[i];
        run_forward_problems(&settings, number, rare[i] + 1);
    }
    *number = 0;
    done += run_focused_problems(&settings, RANDOM_WIDE, number, listed ? WIDE_PROBLEMS : count);
    *number = 0;
    done += run_focused_problems(&settings, RANDOM_PAGED, number, listed ? PAGED_PROBLEMS : count);
    max_runs = INT_MAX;
    *number = begin;
    memset(hopper_paths, 0, sizeof hopper_paths);
    done += run_peaked_problems(&settings, number, begin + (listed ? PEAKED_PROBLEMS : count));
    if (listed && !sample.whole && !sample.searching)
        run_until_every_path_used(&settings, number, PEAKED_PROBLEMS);
    if (!sample.searching) check_paths(!listed);
    for (size_t i = 0; i < sizeof beside_flat / sizeof beside_flat[0] && listed; i++) {
        *number = beside_flat[i];
        run_peaked_problems(&settings, number, beside_flat[i] + 1);
    }
    *number = begin;
    if (listed) count = FLOAT32_PROBLEMS;
    run_float32_problems(settings, "tf32_sm90", FA_PRECISION_TF32, number, count);
    *number = begin;
    run_float32_problems(settings, "f16x3_sm90", FA_PRECISION_FLOAT32, number, count);
    *number = begin;
    run_float32_problems(settings, "tf32_rounded", FA_PRECISION_TF32, number, count);
    *number = begin;
    run_float32_problems(settings, "tf32_split", FA_PRECISION_TF32, number, count);
    *number = begin;
    run_float32_problems(settings, "f16x3_split", FA_PRECISION_FLOAT32, number, count);
    return done;
}

int main(int argc, char **argv)
{
    const int64_t begin = argc > 1 ? atoll(argv[1]) : 0, count = argc > 2 ? atoll(argv[2]) : 0;
    int64_t number = begin;
    const random_settings settings = {.device = FA_DEVICE_CUDA,
                                      .tiles = true,
                                      .one_pass = true,
                                      .attend = attend,
                                      .wants = wants,
                                      .context = &number};
    test_begin();
    const bool searching = sample_begin(argc > 1);
    if (argc > 1 && strcmp(argv[1], "float32") == 0) {
        if (getenv("QUICK") && *getenv("QUICK") == 'p') {
            test_parts();
            return test_end();
        }
        test_tf32();
        if (getenv("QUICK")) return test_end();
        test_f16x3();
        test_parts();
        return test_end();
    }
    if (argc > 3) {
        const bool tf32 = strncmp(argv[3], "tf32", 4) == 0;
        run_float32_problems(settings, argv[3], tf32 ? FA_PRECISION_TF32 : FA_PRECISION_FLOAT32,
                             &number, count);
        print_runs();
        return test_end();
    }
    if (searching) run_problems(settings, &number, begin, count);
    sample_found();
    const int done = run_problems(settings, &number, begin, count);
    test_tf32();
    test_f16x3();
    test_parts();
    for (int n = 0; n < 4; n++) test_equal_scores(n % 2 ? 128 : 64, n / 2);
    for (int n = 0; n < 20; n++)
        test_softcap_range((int64_t[]){64, 96, 128, 192, 256}[n / 4], n % 2, n / 2 % 2);
    test_wild_tables();
    for (int64_t n = 0; n < 12; n++) test_many_sequences(n);
    if (argc == 1) sample_end(kernels, runs);
    CHECK(dynamic || argc > 1, "no problem had a dynamic schedule");
    if (argc > 2) {
        printf("%5d problems, %d with a dynamic schedule\n", done, dynamic);
        print_runs();
    }
    return test_end();
}
