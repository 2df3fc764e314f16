/*
 * decode_latent_sm90, run on the host (cuda_on_cpu.h, hopper_units.h): random problems of latent
 * attention against float64, with keys cut into 1 to 128 parts, each twice, in different orders and
 * with other delays, with equal bits. Then what a server does with many query heads: pages of any
 * size, lengths that change, tables with wrong entries, values that are not finite.
 *
 * Arguments: the first random problem's number, and how many.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "caller_memory.h"
#include "check.h"
#include "convert.h"
#include "cuda/family.h"
#include "cuda/plan_decode.h"
#include "cuda/plan_decode_latent_sm90.h"
#include "forward_on_cpu.h"
#include "hopper_units.h"

enum { PROBLEMS = 400 };

/* The variants, one FORM(name) each: the build writes them. */
typedef struct parameters {
    fa_decode_params decode;
    fa_decode_latent_sm90_params more;
} parameters;

#define FORM(name)                                                                                 \
    void name(fa_decode_params d, fa_decode_latent_sm90_params s);                                 \
    static void run_##name(const void *p)                                                          \
    {                                                                                              \
        const parameters *both = p;                                                                \
        name(both->decode, both->more);                                                            \
    }
#include "test_decode_latent_sm90_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_decode_latent_sm90_on_cpu_forms.h"
};

/* Launches; with clusters; without and with a map of queries; which merge parts, of few rows and of all; problems whose keys
 * were cut. */
static int runs[FA_VARIANTS], clusters, mapped[2], merging[2], cut;

/* ---- Launches -------------------------------------------------------------------------------- */

/* How a call is run. */
typedef struct machine {
    int64_t number;
    bool otherwise;     /* in other orders, with other delays */
    bool one_launch;    /* the last block of a work tile merges, where it can */
    ref_buffers memory; /* what kernels may touch */
} machine;

/* All orders and delays; the slow warp is often the producer. */
static void vary(cuda_run *run, const machine *m)
{
    const uint64_t bits = (uint64_t)(m->number + 1) * 0x9E3779B97F4A7C15u;
    const unsigned delays = (unsigned)(bits >> 61), varied = m->otherwise ? ~delays : delays;
    const uint32_t lanes[] = {~0u, 1, ~1u, (uint32_t)(bits >> 24)};
    run->backwards = varied & 1;
    run->late_copies = varied & 2;
    run->late_products = varied & 4;
    if (!m->otherwise) return;
    run->together = run->cluster ? 2 : 4; /* so that blocks wait for each other's parts */
    run->slow_warp = bits >> 59 & 3 ? (unsigned)(bits >> 50) % (run->threads / 32) : 0;
    run->slow_lanes = bits >> 44 & 1 ? lanes[bits >> 40 & 3] : 0;
}

static void launch(const machine *m, const fa_problem *p, const fa_cuda_plan_launch *l, int step)
{
    char name[160];
    parameters both;
    fa_cuda_fault fault;
    uint32_t grid;
    const int32_t merged_rows = fa_cuda_merged_rows(l, &grid);
    fa_cuda_set_decode_params(p, l, step, (int32_t)(m->number % FA_DECODE_COUNTER_SETS),
                              &both.decode);
    CHECK(
        fa_cuda_decode_latent_sm90_params(p, l, merged_rows, hopper_encode_map, &both.more, &fault),
        "no map");
    if (step == FA_DECODE_MERGE) both.more.cluster = 1;
    cuda_run run = {.name = name,
                    .kernel = kernels[l->variant],
                    .memory = &m->memory,
                    .parameters = &both,
                    .units = &hopper_units,
                    .overlaps = l->overlaps,
                    .begins_early = step == FA_DECODE_MERGE, /* the launch in front has waited */
                    .grid = step == FA_DECODE_MERGE ? grid : l->grid,
                    .cluster = step != FA_DECODE_MERGE && l->cluster > 1 ? l->cluster : 0,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes};
    vary(&run, m);
    snprintf(name, sizeof name,
             "number %lld: %s, %d parts, step %d, %s, %s copies, %s products, lanes %x of warp %u "
             "slow",
             (long long)m->number, fa_variants[l->variant].name, (int)l->decode.parts, step,
             run.backwards ? "backwards" : "forwards", run.late_copies ? "late" : "early",
             run.late_products ? "late" : "early", run.slow_lanes, run.slow_warp);
    runs[l->variant]++;
    if (run.cluster) clusters++;
    if (step != FA_DECODE_MERGE) mapped[both.more.maps_queries]++;
    cuda_run_kernel(&run);
}

/* False if memory beside the workspace was written. */
static bool run_plan(machine *m, fa_problem *p, const fa_cuda_plan_launch *l)
{
    fa_decode_params params;
    begin_workspace(&m->memory, p, l->workspace_bytes);
    fa_cuda_set_decode_params(p, l, FA_DECODE_STORE, 0, &params);
    if (m->one_launch && fa_cuda_latent_merges(l, &params)) {
        launch(m, p, l, FA_DECODE_LAST);
        merging[params.heads * params.queries == fa_variants[l->variant].group_rows]++;
    } else {
        launch(m, p, l, FA_DECODE_STORE);
        if (l->decode.parts > 1) launch(m, p, l, FA_DECODE_MERGE);
    }
    return end_workspace(&m->memory, p);
}

/* ---- Random problems ------------------------------------------------------------------------- */

/* Clusters wherever the kernel can have them, for few keys as well. */
static void choose_cluster(fa_cuda_plan_launch *l) { l->cluster = l->decode.chunks % 2 ? 1 : 2; }

/* One key tile in a part is the least that there is. */
static void choose_parts(int64_t number, fa_cuda_plan_launch *l)
{
    static const int64_t parts[] = {1, 2, 3, 128, 0, 5, 1};
    const int64_t count = parts[number % 7];
    if (count > 0) fa_cuda_cut_decode(l, 0, count, 1);
    choose_cluster(l);
}

static bool wants(void *context, const random_call *call)
{
    char message[320];
    fa_problem p;
    fa_cuda_plan plan;
    fa_tensor_map_shape map;
    (void)context;
    if (make_forward(call, &p, message, sizeof message) != FA_OK) return true; /* attend says why */
    return fa_cuda_plan_make(&p, &devices[H200], &fa_cuda_decode_latent_sm90, &plan, NULL, 0) &&
           sample_takes(&p, &plan, !fa_cuda_map_latent_queries(&p, &plan.launches[0], &map));
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_plan plan;
    machine m = {.number = *(const int64_t *)context, .memory = *call->buffers};
    const fa_status status = make_forward(call, &p, message, size);
    if (status != FA_OK) return status;
    if (!fa_cuda_plan_make(&p, &devices[H200], &fa_cuda_decode_latent_sm90, &plan, message, size))
        return FA_ERROR_UNSUPPORTED;
    fa_cuda_plan_launch *l = &plan.launches[0];
    if (l->idle) return FA_OK;
    choose_parts(m.number, l);
    cut += l->decode.parts > 1;
    char *const before = ref_buffers_copy(call->buffers);
    m.one_launch = m.number / 7 % 3 != 0;
    bool clean = run_plan(&m, &p, l);
    char *const first = ref_buffers_copy(call->buffers);
    ref_buffers_put(call->buffers, before);
    m.otherwise = true;
    m.one_launch = m.number / 7 % 3 != 1;
    clean &= run_plan(&m, &p, l);
    const bool same = ref_buffers_are(call->buffers, first);
    free(before), free(first);
    return random_status_of_runs(clean, same, message, size);
}

/* Returns how many problems were for this family. */
static int run_random_problems(int64_t first, int64_t end)
{
    static random_result result;
    int done = 0;
    int64_t number = first;
    random_settings settings = {.device = FA_DEVICE_CUDA,
                                .attend = attend,
                                .wants = wants,
                                .context = &number,
                                .focus = RANDOM_LATENT,
                                .few_queries = true,
                                .tiles = true};
    for (; number < end; number++) {
        random_problem_run((uint64_t)number, &settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED) continue;
        done++;
        CHECK(result.report.ok, "number %lld: %s\n  %s", (long long)number, result.report.message,
              result.description);
    }
    return done;
}

/* ---- What a server does ---------------------------------------------------------------------- */

enum { BATCH = 3, PAGE_NUMBERS = 512, DIM = 576, VALUES = 512 };

/* A cache and what is asked of it. */
typedef struct server {
    fa_dtype type;
    int64_t heads, n_q, longest;
    int64_t page; /* 0: not in pages */
    int64_t pages, stride;
    int32_t lengths[BATCH], table[PAGE_NUMBERS];
    uint16_t *q, *k, *out;
    float *lse;
    size_t q_size, k_size, out_size, lse_size; /* elements */
    fa_options options;
    fa_problem problem;
    machine machine;
} server;

static double load(const server *s, uint16_t x)
{
    return s->type == FA_FLOAT16 ? fa_half_to_float(x) : fa_bfloat_to_float(x);
}

static uint16_t store(const server *s, double x)
{
    return s->type == FA_FLOAT16 ? fa_float_to_half((float)x) : fa_float_to_bfloat((float)x);
}

/* A cache full of NaN, and queries. Pages of a sequence are neither neighbours nor in order. */
static server *new_server(const server *shape, int64_t page, int64_t number)
{
    server *s = malloc(sizeof *s);
    if (!s) abort();
    *s = *shape;
    ref_random random = {(uint64_t)number};
    s->machine = (machine){.number = number};
    s->page = page;
    s->stride = page ? (s->longest + page - 1) / page : 0;
    s->pages = page ? BATCH * s->stride + 3 : BATCH;
    if (BATCH * s->stride > PAGE_NUMBERS) abort();
    s->q_size = (size_t)(BATCH * s->n_q * s->heads * DIM);
    s->k_size = (size_t)(s->pages * (page ? page : s->longest) * DIM);
    s->out_size = (size_t)(BATCH * s->n_q * s->heads * VALUES);
    s->lse_size = (size_t)(BATCH * s->n_q * s->heads);
    s->q = new_memory(&s->machine.memory, "q", 2 * s->q_size);
    s->k = new_memory(&s->machine.memory, "k", 2 * s->k_size);
    s->out = new_memory(&s->machine.memory, "out", 2 * s->out_size);
    s->lse = new_memory(&s->machine.memory, "lse", 4 * s->lse_size);
    add_memory(&s->machine.memory, "lengths", s->lengths, sizeof s->lengths);
    add_memory(&s->machine.memory, "table", s->table, sizeof s->table);
    for (size_t i = 0; i < s->q_size; i++) s->q[i] = store(s, ref_random_normal(&random));
    for (int64_t i = 0; i < BATCH * s->stride; i++)
        s->table[i] = (int32_t)(BATCH * s->stride + 2 - (i ^ 1)); /* 1 to the last page but one */
    return s;
}

static void free_server(server *s)
{
    free(s->q), free(s->k), free(s->out), free(s->lse);
    free(s);
}

/* Row j of sequence b in the cache. */
static uint16_t *row_at(const server *s, int64_t b, int64_t j)
{
    int64_t row = b * s->longest + j;
    if (s->page) row = s->table[b * s->stride + j / s->page] * s->page + j % s->page;
    return s->k + row * DIM;
}

/* Lengths, and keys of all rows in front of them, the same in whatever cache; NaN behind, and in
 * the table what leads nowhere. */
static void fill(server *s, const int32_t *lengths)
{
    memset(s->k, POISON, 2 * s->k_size);
    for (int64_t b = 0; b < BATCH; b++) {
        s->lengths[b] = lengths[b];
        for (int64_t j = 0; j < lengths[b]; j++) {
            ref_random random = {(uint64_t)(b * 1000003 + j)};
            uint16_t *row = row_at(s, b, j);
            for (int c = 0; c < DIM; c++) row[c] = store(s, ref_random_normal(&random));
        }
        for (int64_t i = 0; i < s->stride; i++)
            if (i * s->page >= lengths[b]) s->table[b * s->stride + i] = i % 2 ? INT32_MAX : -7;
    }
}

/* The problem and its launch, with keys cut into so many parts. */
static fa_cuda_plan_launch make_launch(server *s, int64_t parts)
{
    char why[320] = "";
    static fa_cuda_plan plan;
    const fa_tensor q = fa_bshd(s->q, s->type, BATCH, s->n_q, s->heads, DIM);
    const fa_tensor out = fa_bshd(s->out, s->type, BATCH, s->n_q, s->heads, VALUES);
    const fa_tensor k = fa_bshd(s->k, s->type, s->pages, s->page ? s->page : s->longest, 1, DIM);
    fa_tensor v = k;
    v.shape[3] = VALUES;
    s->options = (fa_options)FA_OPTIONS_INIT;
    s->options.flags = FA_CAUSAL;
    s->options.scale = 0.1f;
    s->options.seqlens_k = s->lengths;
    s->options.block_table = s->page ? s->table : NULL;
    s->options.block_table_stride = s->stride;
    const fa_arguments a = {.pass = FA_PASS_DECODE,
                            .device = FA_DEVICE_CUDA,
                            .q = &q,
                            .k = &k,
                            .v = &v,
                            .out = &out,
                            .lse = s->lse,
                            .options = &s->options};
    CHECK(fa_problem_make(&a, &s->problem) == FA_OK, "%s", fa_last_error());
    CHECK(fa_cuda_plan_make(&s->problem, &devices[H200], &fa_cuda_decode_latent_sm90, &plan, why,
                            sizeof why),
          "%s", why);
    fa_cuda_cut_decode(&plan.launches[0], 0, parts, 1);
    choose_cluster(&plan.launches[0]);
    return plan.launches[0];
}

static void run_server(server *s, int64_t parts)
{
    const fa_cuda_plan_launch l = make_launch(s, parts);
    memset(s->out, POISON, 2 * s->out_size);
    memset(s->lse, POISON, 4 * s->lse_size);
    CHECK(run_plan(&s->machine, &s->problem, &l), "memory beside the workspace was written");
}

static bool is_same(const server *a, const server *b)
{
    return memcmp(a->out, b->out, 2 * a->out_size) == 0 &&
           memcmp(a->lse, b->lse, 4 * a->lse_size) == 0;
}

/* Query i of a sequence and a head in double; returns the log-sum-exp. */
static double expect(const server *s, int64_t b, int64_t i, int64_t h, double out[VALUES])
{
    const uint16_t *q = s->q + ((b * s->n_q + i) * s->heads + h) * DIM;
    const int64_t keys = s->lengths[b] - (s->n_q - 1 - i);
    double top = -INFINITY, sum = 0;
    double *p = malloc(sizeof *p * (size_t)(keys > 0 ? keys : 1));
    if (!p) abort();
    for (int c = 0; c < VALUES; c++) out[c] = 0;
    for (int64_t j = 0; j < keys; j++) {
        const uint16_t *k = row_at(s, b, j);
        p[j] = 0;
        for (int c = 0; c < DIM; c++) p[j] += load(s, q[c]) * load(s, k[c]);
        p[j] *= (double)s->options.scale;
        top = fmax(top, p[j]);
    }
    for (int64_t j = 0; j < keys; j++) sum += p[j] = exp(p[j] - top);
    for (int64_t j = 0; j < keys; j++) {
        const uint16_t *k = row_at(s, b, j);
        for (int c = 0; c < VALUES; c++) out[c] += p[j] / sum * load(s, k[c]);
    }
    free(p);
    return keys > 0 ? top + log(sum) : -INFINITY;
}

/* Every tenth row or so. */
static void check_server(const server *s, const char *what)
{
    const double unit = s->type == FA_FLOAT16 ? 0x1p-11 : 0x1p-8;
    double want[VALUES];
    for (int64_t row = 0; row < (int64_t)s->lse_size; row += 11) {
        const int64_t b = row / (s->n_q * s->heads), i = row / s->heads % s->n_q,
                      h = row % s->heads;
        const double lse = expect(s, b, i, h, want);
        const float got = s->lse[(b * s->heads + h) * s->n_q + i];
        CHECK(lse == got || fabs(lse - got) < 1e-3, "%s, row %d: %g, expected %g", what, (int)row,
              got, lse);
        for (int c = 0; c < VALUES; c++) {
            const double x = load(s, s->out[row * VALUES + c]);
            const double error = unit * (2 * fabs(want[c]) + 2);
            if (!(fabs(x - want[c]) <= error)) {
                CHECK(false, "%s, row %d, column %d: %g, expected %g +- %g", what, (int)row, c, x,
                      want[c], error);
                return;
            }
        }
    }
}

static const server shapes[] = {
    {.type = FA_BFLOAT16, .heads = 128, .n_q = 1, .longest = 700},
    {.type = FA_FLOAT16, .heads = 64, .n_q = 2, .longest = 400},
    {.type = FA_BFLOAT16, .heads = 24, .n_q = 4, .longest = 330},
    {.type = FA_FLOAT16, .heads = 80, .n_q = 3, .longest = 200},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* Whatever holds the keys, pages of any size or none, results are right and have the same bits. */
static void test_pages(void)
{
    static const int64_t sizes[] = {64, 8, 16, 40, 32, 128, 256, 1000};
    for (int i = 0; i < SHAPES; i++) {
        const int32_t longest = (int32_t)shapes[i].longest;
        const int32_t lengths[BATCH] = {longest, i % 2 ? 0 : 1, longest / 2 + 3};
        char what[80];
        server *plain = new_server(&shapes[i], 0, 100 + i);
        fill(plain, lengths);
        run_server(plain, i % 2 ? 3 : 1);
        snprintf(what, sizeof what, "shape %d", i);
        check_server(plain, what);
        for (int n = i % 2; n < 8; n += 2) {
            if (!sample_has(n / 2, i)) continue;
            server *paged = new_server(&shapes[i], sizes[n], 100 + i);
            paged->machine.otherwise = n / 2 % 2;
            fill(paged, lengths);
            run_server(paged, i % 2 ? 3 : 1);
            CHECK(is_same(plain, paged), "shape %d, pages of %d: others", i, (int)sizes[n]);
            free_server(paged);
        }
        free_server(plain);
    }
}

/* One launch, as a graph has it, over and over with other lengths. */
static void test_replay(void)
{
    static const int32_t lengths[][BATCH] = {
        {330, 330, 330}, {0, 0, 0}, {64, 65, 1}, {3, 128, 200}};
    server *s = new_server(&shapes[2], 64, 200);
    for (int n = 0; n < 4; n++) {
        char what[80];
        for (int64_t i = 0; i < BATCH * s->stride; i++) s->table[i] = (int32_t)i;
        fill(s, lengths[n]);
        s->machine.otherwise = n % 2;
        run_server(s, 4);
        snprintf(what, sizeof what, "replay %d", n);
        check_server(s, what);
    }
    free_server(s);
}

/* However many parts, results are right. */
static void test_parts(void)
{
    static const int64_t parts[] = {2, 5, 11, 128};
    const server shape = {.type = FA_FLOAT16, .heads = 20, .n_q = 1, .longest = 1500};
    const int32_t lengths[BATCH] = {1500, 700, 65};
    server *s = new_server(&shape, 64, 300);
    fill(s, lengths);
    for (int i = 0; i < 4; i++) {
        char what[80];
        run_server(s, parts[i]);
        snprintf(what, sizeof what, "%d parts", (int)parts[i]);
        check_server(s, what);
    }
    free_server(s);
}

/* Parts, some of sequences that have one or none, have the same results in one launch, whichever
 * block is last, and in two. */
static void test_merging(void)
{
    static const server few[] = {{.type = FA_BFLOAT16, .heads = 128, .n_q = 1, .longest = 300},
                                 {.type = FA_FLOAT16, .heads = 64, .n_q = 1, .longest = 200},
                                 {.type = FA_BFLOAT16, .heads = 16, .n_q = 1, .longest = 330},
                                 {.type = FA_FLOAT16, .heads = 10, .n_q = 3, .longest = 150}};
    static const int32_t lengths[][BATCH] = {
        {300, 64, 65}, {130, 0, 199}, {330, 1, 129}, {150, 65, 0}};
    static const int64_t parts[] = {2, 2, 4, 2};
    for (int i = 0; i < 4; i++) {
        server *two = NULL;
        for (int n = 0; n < 4; n++) {
            server *s = new_server(&few[i], 64, 600 + i);
            s->machine.number += n * FA_DECODE_COUNTER_SETS; /* other delays, the same counters */
            s->machine.one_launch = n > 0;
            s->machine.otherwise = n > 1;
            fill(s, lengths[i]);
            run_server(s, parts[i]);
            if (!two) {
                check_server(s, "two launches");
                two = s;
                continue;
            }
            CHECK(is_same(two, s), "shape %d, run %d: other bits", i, n);
            free_server(s);
        }
        free_server(two);
    }
}

/* A table that leads nowhere leads no access out of the cache. */
static void test_wild_tables(void)
{
    static const int64_t pages[] = {64, 16};
    const int32_t lengths[BATCH] = {400, 350, 1};
    for (int n = 0; n < 2; n++) {
        server *s = new_server(&shapes[1], pages[n], 400);
        fill(s, lengths);
        for (int64_t i = 0; i < BATCH * s->stride; i += 2)
            s->table[i] = i % 4 ? INT32_MIN : (int32_t)s->pages;
        run_server(s, 2);
        free_server(s);
    }
}

/* One of the last keys is not finite, and some queries of its work tile do not see it: they have
 * nothing of that. Those that see it have NaN, or what an infinite score makes, which is not looked
 * at. */
static void test_nonfinite_values(void)
{
    static const double bad[BATCH] = {NAN, INFINITY, -INFINITY};
    static const int unseen[BATCH] = {3, 1,
                                      3}; /* queries that do not see it, of 4, two a work tile */
    static const int32_t lengths[BATCH] = {200, 66, 129};
    const server *shape = &shapes[2];
    server *s = new_server(shape, 0, 500);
    fill(s, lengths);
    for (int b = 0; b < BATCH; b++)
        row_at(s, b, lengths[b] - 4 + unseen[b])[37 + 200 * b] = store(s, bad[b]);
    run_server(s, 2);
    for (int64_t row = 0; row < (int64_t)s->lse_size; row++) {
        const int64_t h = row % s->heads, i = row / s->heads % s->n_q, b = row / s->heads / s->n_q;
        const uint16_t *out = s->out + row * VALUES;
        double want[VALUES];
        int wrong = 0;
        if (i >= unseen[b]) continue;
        expect(s, b, i, h, want);
        for (int c = 0; c < VALUES; c++)
            wrong += !(fabs(load(s, out[c]) - want[c]) <= 0x1p-7 * (fabs(want[c]) + 1));
        CHECK(wrong == 0, "sequence %d, query %d, head %d: %d columns are wrong", (int)b, (int)i,
              (int)h, wrong);
    }
    CHECK(isnan(s->lse[3]), "the last query sees NaN, and has %g", s->lse[3]);
    free_server(s);
}

int main(int argc, char **argv)
{
    const int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    test_begin();
    if (sample_begin(argc > 1)) run_random_problems(number, end);
    sample_found();
    const int done = run_random_problems(number, end);
    if (argc == 1) {
        test_pages();
        test_replay();
        test_parts();
        test_merging();
        test_wild_tables();
        test_nonfinite_values();
        sample_end(kernels, runs);
    }
    CHECK(done > 0 && (cut > 0 || argc > 1), "no problem was for this kernel");
    CHECK((mapped[0] > 0 && mapped[1] > 0) || argc > 1, "queries were always mapped, or never");
    CHECK((clusters > 0 && merging[0] > 0 && merging[1] > 0) || argc > 1,
          "no launch had clusters, or merged parts");
    if (argc > 2) {
        printf("%d problems, keys of %d cut\n", done, cut);
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    }
    return test_end();
}
