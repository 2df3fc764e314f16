/*
 * decode_sm80, run on the host (cuda_on_cpu.h): random problems from the whole option space against float64, with keys cut into
 * 1 to 128 parts, merged by the last block or by a second launch, each twice and in different orders, with
 * equal bits. Then what a server does: pages of any size, captured calls whose lengths change, tables with wrong
 * entries.
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
#include "forward_on_cpu.h"

enum { PROBLEMS = 110 };

/* The variants, one FORM(name) each: the build writes them. */
#define FORM(name)                                                                                 \
    void name(fa_decode_params p);                                                                 \
    static void run_##name(const void *p) { name(*(const fa_decode_params *)p); }
#include "test_decode_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_decode_on_cpu_forms.h"
};

static int runs[FA_VARIANTS], cut; /* launches; problems whose keys were cut, */
static int mixed;                  /* and of mixed batches */

/* How a call is run. */
typedef struct machine {
    int64_t number;
    bool otherwise;     /* in other orders */
    bool two_launches;  /* parts are merged by a second launch */
    ref_buffers memory; /* what kernels may touch */
} machine;

/* ---- Launches -------------------------------------------------------------------------------- */

static void launch(const machine *m, const fa_problem *p, const fa_cuda_plan_launch *l, int step)
{
    char name[120];
    fa_decode_params params;
    fa_cuda_set_decode_params(p, l, step, (int32_t)(m->number % FA_DECODE_COUNTER_SETS), &params);
    cuda_run run = {.name = name,
                    .kernel = kernels[l->variant],
                    .memory = &m->memory,
                    .parameters = &params,
                    .grid = step == FA_DECODE_MERGE ? (unsigned)l->tasks : l->grid,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes,
                    .backwards = (m->number / 2 % 2 == 1) != m->otherwise,
                    .last_block_first = m->otherwise};
    if (m->otherwise) {
        run.together = 1 + (unsigned)m->number % 3;
        run.slow_warp = (unsigned)m->number % (l->threads / 32);
        run.slow_lanes = ~0u;
    }
    snprintf(name, sizeof name, "number %lld: %s, %d parts, step %d", (long long)m->number,
             fa_variants[l->variant].name, (int)l->decode.parts, step);
    runs[l->variant]++;
    cuda_run_kernel(&run);
}

/* False if memory beside the workspace was written. */
static bool run_plan(machine *m, fa_problem *p, const fa_cuda_plan_launch *l)
{
    begin_workspace(&m->memory, p, l->workspace_bytes);
    if (m->two_launches && l->decode.parts > 1) {
        launch(m, p, l, FA_DECODE_STORE);
        launch(m, p, l, FA_DECODE_MERGE);
    } else launch(m, p, l, FA_DECODE_LAST);
    return end_workspace(&m->memory, p);
}

enum { MOST_SEQUENCES = 64 };

/* An element of the result of each packed sequence, or NULL: of those with at most so many queries,
 * or of the others. They have 16 bits. */
static void find_elements(const fa_problem *p, int64_t most, bool few, uint16_t *at[MOST_SEQUENCES])
{
    if (p->batch > MOST_SEQUENCES) abort();
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t start = p->cu_seqlens_q[b], queries = p->cu_seqlens_q[b + 1] - start;
        const bool chosen = queries > 0 && (queries <= most) == few;
        at[b] = chosen ? (uint16_t *)(void *)p->out.data + start * p->out.stride[1] : NULL;
    }
}

/* Runs the launch for sequences of few queries, or for the others. False if it wrote to rows of the
 * other kind. */
static bool run_kind(machine *m, fa_problem *p, const fa_cuda_plan_launch *l, int64_t most,
                     bool few)
{
    enum { MARK = 0x5a5a };
    uint16_t *at[MOST_SEQUENCES], before[MOST_SEQUENCES];
    find_elements(p, most, !few, at);
    for (int64_t b = 0; b < p->batch; b++)
        if (at[b]) before[b] = *at[b], *at[b] = MARK;
    bool clean = run_plan(m, p, l);
    for (int64_t b = 0; b < p->batch; b++) {
        if (!at[b]) continue;
        clean &= *at[b] == MARK;
        *at[b] = before[b];
    }
    return clean;
}

/* A mixed batch in two launches: sequences of few queries, and the others. */
static bool run_mixed(machine *m, fa_problem *p, const fa_cuda_plan_launch *l)
{
    char why[320] = "";
    fa_cuda_plan plan;
    fa_cuda_plan_begin(&devices[H200], &fa_cuda_decode, &plan);
    CHECK(fa_cuda_add_few(p, &devices[H200], &plan, why, sizeof why), "%s", why);
    fa_cuda_plan_launch few = plan.launches[0], many = *l;
    few.decode.most_queries = (int32_t)(1 + m->number % 3);
    many.fewest_queries = few.decode.most_queries + 1;
    fa_cuda_cut_decode(&few, l->decode.parts, 1);
    mixed++;
    const bool two_launches = m->two_launches;
    m->two_launches |= few.tasks > FA_DECODE_COUNTERS;
    const bool clean = run_kind(m, p, &few, few.decode.most_queries, true);
    m->two_launches = two_launches;
    return run_kind(m, p, &many, few.decode.most_queries, false) && clean;
}

/* ---- Random problems ------------------------------------------------------------------------- */

/* One key tile of a block in a part is the least that there is. */
static void choose_parts(int64_t number, fa_cuda_plan_launch *l)
{
    static const int64_t parts[] = {1, 2, 3, 128, 5, 0, 17};
    const int64_t count = parts[number % 7];
    if (count > 0) fa_cuda_cut_decode(l, count, 1);
    if (l->tasks > FA_DECODE_COUNTERS && number % 2 == 0) fa_cuda_cut_decode(l, 1, 1);
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_plan plan;
    machine m = {.number = *(const int64_t *)context, .memory = *call->buffers};
    const fa_status status = make_forward(call, &p, message, size);
    if (status != FA_OK) return status;
    fa_cuda_plan_begin(&devices[H200], &fa_cuda_decode, &plan);
    if (!fa_cuda_plan_decode(&p, &devices[H200], INT64_MAX, &plan, message, size))
        return FA_ERROR_UNSUPPORTED;
    fa_cuda_plan_launch *l = &plan.launches[0];
    choose_parts(m.number, l);
    if (l->idle) return FA_OK;
    m.two_launches = m.number % 3 == 0 || l->tasks > FA_DECODE_COUNTERS;
    cut += l->decode.parts > 1;
    char *const before = ref_buffers_copy(call->buffers);
    const bool is_mixed = p.cu_seqlens_q && m.number % 2;
    bool clean = is_mixed ? run_mixed(&m, &p, l) : run_plan(&m, &p, l);
    char *const first = ref_buffers_copy(call->buffers);
    ref_buffers_put(call->buffers, before);
    m.otherwise = true;
    m.two_launches = !m.two_launches || l->tasks > FA_DECODE_COUNTERS;
    clean &= is_mixed ? run_mixed(&m, &p, l) : run_plan(&m, &p, l);
    const bool same = ref_buffers_are(call->buffers, first);
    free(before), free(first);
    if (clean && same) return FA_OK;
    snprintf(message, size, "%s",
             clean ? "a second run left other bits"
                   : "memory that is not the launch's was written");
    return (fa_status)RANDOM_WRONG;
}

/* alone: the one class; RANDOM_ANYTHING: all that have no kernels of their own. */
static int run_random_problems(int64_t first, int64_t end, random_focus alone)
{
    static random_result result;
    static const random_focus focuses[] = {RANDOM_SPLIT,   RANDOM_UNUSED,     RANDOM_LENGTHS,
                                           RANDOM_MASKS,   RANDOM_ANYTHING,   RANDOM_SPLIT,
                                           RANDOM_STRIDES, RANDOM_EMPTY,      RANDOM_TAILS,
                                           RANDOM_SPLIT,   RANDOM_INVARIANCE, RANDOM_PEAKED};
    int done = 0;
    int64_t number = first;
    random_settings settings = {.device = FA_DEVICE_CUDA, .attend = attend, .context = &number};
    if (first == 0 && alone == RANDOM_ANYTHING) run_known_problems(&settings, &number);
    for (; number < end; number++) {
        settings.focus = focuses[number % (int64_t)(sizeof focuses / sizeof focuses[0])];
        if (alone != RANDOM_ANYTHING) settings.focus = alone;
        settings.few_queries = true;
        settings.tiles = settings.focus != RANDOM_TAILS && number % 2;
        /* The tails' number says the head dim: all widths, not only the first. */
        const int64_t problem = settings.focus == RANDOM_TAILS ? number * 37 % 256 : number;
        random_problem_run((uint64_t)problem, &settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED) continue;
        done++;
        CHECK(result.report.ok, "number %lld: %s\n  %s", (long long)number, result.report.message,
              result.description);
    }
    return done;
}

/* ---- What a server does ---------------------------------------------------------------------- */

enum { BATCH = 4, MOST_QUERIES = 4, MOST_HEADS = 8, PAGE_NUMBERS = 2048 };

/* A cache and what is asked of it. */
typedef struct server {
    int64_t batch, heads_q, heads_kv, n_q, longest, d;
    int64_t page; /* 0: not in pages */
    int64_t pages, stride;
    int32_t lengths[BATCH], table[PAGE_NUMBERS];
    uint16_t *q, *k, *v, *out; /* float16 */
    float *lse;
    size_t q_size, kv_size, lse_size; /* elements */
    fa_options options;
    fa_problem problem;
    machine machine;
} server;

/* A cache full of NaN, and queries. Pages of a sequence are neither neighbours nor in order. */
static server *new_server(const server *shape, int64_t number)
{
    server *s = malloc(sizeof *s);
    if (!s) abort();
    *s = *shape;
    ref_random random = {(uint64_t)number};
    s->machine = (machine){.number = number};
    s->stride = s->page ? (s->longest + s->page - 1) / s->page : 0;
    s->pages = s->page ? s->batch * s->stride + 3 : s->batch;
    if (s->batch * s->stride > PAGE_NUMBERS) abort();
    s->q_size = (size_t)(s->batch * s->n_q * s->heads_q * s->d);
    s->kv_size = (size_t)(s->pages * (s->page ? s->page : s->longest) * s->heads_kv * s->d);
    s->lse_size = (size_t)(s->batch * s->n_q * s->heads_q);
    s->q = new_memory(&s->machine.memory, "q", 2 * s->q_size);
    s->k = new_memory(&s->machine.memory, "k", 2 * s->kv_size);
    s->v = new_memory(&s->machine.memory, "v", 2 * s->kv_size);
    s->out = new_memory(&s->machine.memory, "out", 2 * s->q_size);
    s->lse = new_memory(&s->machine.memory, "lse", 4 * s->lse_size);
    add_memory(&s->machine.memory, "lengths", s->lengths, sizeof s->lengths);
    add_memory(&s->machine.memory, "table", s->table, sizeof s->table);
    for (size_t i = 0; i < s->q_size; i++)
        s->q[i] = fa_float_to_half((float)ref_random_normal(&random));
    for (int64_t i = 0; i < s->batch * s->stride; i++)
        s->table[i] = (int32_t)((i * 7 + 2) % (s->batch * s->stride));
    for (int64_t i = 0; s->stride % 7 == 0 && i < s->batch * s->stride; i++)
        s->table[i] = (int32_t)(s->batch * s->stride - i); /* 7 does not reach all */
    return s;
}

static void free_server(server *s)
{
    free(s->q), free(s->k), free(s->v), free(s->out), free(s->lse);
    free(s);
}

/* Row j of sequence b in the cache. */
static size_t row_at(const server *s, int64_t b, int64_t j)
{
    int64_t row = b * s->longest + j;
    if (s->page) row = s->table[b * s->stride + j / s->page] * s->page + j % s->page;
    return (size_t)(row * s->heads_kv * s->d);
}

/* Lengths, and keys and values of all rows in front of them, the same in whatever cache; NaN behind, and in
 * the table what leads nowhere. */
static void fill(server *s, const int32_t *lengths, bool wild)
{
    const size_t count = (size_t)(s->heads_kv * s->d);
    memset(s->k, POISON, 2 * s->kv_size);
    memset(s->v, POISON, 2 * s->kv_size);
    for (int64_t b = 0; b < s->batch; b++) {
        s->lengths[b] = lengths[b];
        for (int64_t j = 0; j < lengths[b]; j++) {
            ref_random random = {(uint64_t)(b * 1000003 + j)};
            const size_t at = row_at(s, b, j);
            for (size_t i = 0; i < count; i++) {
                s->k[at + i] = fa_float_to_half((float)ref_random_normal(&random));
                s->v[at + i] = fa_float_to_half((float)ref_random_normal(&random));
            }
        }
        for (int64_t i = 0; wild && i < s->stride; i++)
            if (i * s->page >= lengths[b]) s->table[b * s->stride + i] = i % 2 ? INT32_MAX : -7;
    }
}

/* The problem and its launch, with keys cut into so many parts. */
static fa_cuda_plan_launch make_launch(server *s, int64_t parts)
{
    char why[320] = "";
    fa_cuda_plan plan = {0};
    const fa_tensor q = fa_bshd(s->q, FA_FLOAT16, s->batch, s->n_q, s->heads_q, s->d);
    const fa_tensor out = fa_bshd(s->out, FA_FLOAT16, s->batch, s->n_q, s->heads_q, s->d);
    const int64_t rows = s->page ? s->page : s->longest;
    const fa_tensor k = fa_bshd(s->k, FA_FLOAT16, s->pages, rows, s->heads_kv, s->d);
    const fa_tensor v = fa_bshd(s->v, FA_FLOAT16, s->pages, rows, s->heads_kv, s->d);
    s->options = (fa_options)FA_OPTIONS_INIT;
    s->options.flags = FA_CAUSAL;
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
    CHECK(fa_cuda_plan_make(&s->problem, &devices[H200], &fa_cuda_decode, &plan, why, sizeof why) &&
              plan.family == &fa_cuda_decode,
          "%s", why);
    fa_cuda_cut_decode(&plan.launches[0], parts, 1);
    return plan.launches[0];
}

static void run_server(server *s, int64_t parts)
{
    const fa_cuda_plan_launch l = make_launch(s, parts);
    memset(s->out, POISON, 2 * s->q_size);
    memset(s->lse, POISON, 4 * s->lse_size);
    CHECK(run_plan(&s->machine, &s->problem, &l), "memory beside the workspace was written");
}

static bool is_same(const server *a, const server *b)
{
    return memcmp(a->out, b->out, 2 * a->q_size) == 0 &&
           memcmp(a->lse, b->lse, 4 * a->lse_size) == 0;
}

/* The largest differences of results. Infinities must be equal. */
static double difference(const server *a, const server *b)
{
    double worst = 0;
    for (size_t i = 0; i < a->q_size; i++) {
        const double x = fabs(fa_half_to_float(a->out[i]) - fa_half_to_float(b->out[i]));
        if (!(x <= worst)) worst = isnan(x) ? INFINITY : x;
    }
    for (size_t i = 0; i < a->lse_size; i++) {
        const double x = a->lse[i] == b->lse[i] ? 0 : fabs(a->lse[i] - b->lse[i]);
        if (!(x <= worst)) worst = isnan(x) ? INFINITY : x;
    }
    return worst;
}

static const server shapes[] = {
    {.batch = BATCH, .heads_q = 8, .heads_kv = 2, .n_q = 1, .longest = 700, .d = 64},
    {.batch = BATCH, .heads_q = 4, .heads_kv = 4, .n_q = 3, .longest = 401, .d = 128},
    {.batch = BATCH, .heads_q = 8, .heads_kv = 1, .n_q = 4, .longest = 300, .d = 128},
    {.batch = BATCH, .heads_q = 4, .heads_kv = 2, .n_q = 1, .longest = 257, .d = 256},
    {.batch = BATCH, .heads_q = 2, .heads_kv = 1, .n_q = 2, .longest = 300, .d = 80},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* Pages of any size hold the same keys, so results have the same bits. */
static void test_pages(void)
{
    static const int64_t sizes[] = {1, 3, 16, 32, 48, 64, 128, 256, 1000};
    for (int i = 0; i < SHAPES; i++) {
        const int32_t longest = (int32_t)shapes[i].longest;
        const int32_t lengths[BATCH] = {longest, 0, 1, longest / 2 + 3};
        server *plain = new_server(&shapes[i], 100 + i);
        fill(plain, lengths, false);
        run_server(plain, 3);
        for (int n = i % 2; n<9; n += SHAPES> 1 ? 2 : 1) {
            server paged_shape = shapes[i];
            paged_shape.page = sizes[n];
            if (BATCH * ((longest + sizes[n] - 1) / sizes[n]) > PAGE_NUMBERS) continue;
            server *paged = new_server(&paged_shape, 100 + i);
            fill(paged, lengths, true);
            run_server(paged, 3);
            CHECK(is_same(plain, paged), "shape %d, pages of %d: differs by %g", i, (int)sizes[n],
                  difference(plain, paged));
            free_server(paged);
        }
        free_server(plain);
    }
}

/* One launch, as a graph has it, over and over with other lengths: counters are clean each time, and what the workspace
 * still holds does not show. */
static void test_replay(void)
{
    static const int lengths[][BATCH] = {{100, 100, 100, 100}, {0, 0, 0, 0},  {100, 0, 50, 1},
                                         {3, 99, 0, 64},       {1, 1, 1, 40}, {100, 100, 100, 100}};
    for (int i = 0; i < SHAPES; i++) {
        server shape = shapes[i];
        shape.page = 16;
        server *graph = new_server(&shape, 200 + i), *fresh = new_server(&shape, 200 + i);
        fresh->machine.number += 1000;
        const fa_cuda_plan_launch l = make_launch(graph, 5);
        char *workspace = new_memory(&graph->machine.memory, "workspace", l.workspace_bytes);
        graph->problem.workspace = workspace;
        for (int n = 0; n < 6; n++) {
            int32_t now[BATCH];
            for (int b = 0; b < BATCH; b++) now[b] = (int32_t)(lengths[n][b] * shape.longest / 100);
            fill(graph, now, false);
            fill(fresh, now, false);
            memset(graph->out, POISON, 2 * graph->q_size);
            memset(graph->lse, POISON, 4 * graph->lse_size);
            graph->machine.otherwise = n % 2;
            launch(&graph->machine, &graph->problem, &l, FA_DECODE_LAST);
            fresh->machine.two_launches = n % 2;
            run_server(fresh, 5);
            CHECK(is_same(graph, fresh), "shape %d, replay %d: differs by %g", i, n,
                  difference(graph, fresh));
        }
        free(workspace);
        free_server(graph);
        free_server(fresh);
    }
}

/* However many parts, the result is the same but for rounding: a last bit of float16. */
static void test_parts(void)
{
    static const int64_t parts[] = {2, 3, 4, 7, 16, 33, 64, 100, 127, 128};
    const server shape = {
        .batch = 2, .heads_q = 4, .heads_kv = 1, .n_q = 2, .longest = 8200, .d = 128};
    const int32_t lengths[BATCH] = {8200, 1234};
    server *whole = new_server(&shape, 300), *cut_up = new_server(&shape, 300);
    fill(whole, lengths, false);
    fill(cut_up, lengths, false);
    run_server(whole, 1);
    for (int i = 0; i < 10; i++) {
        cut_up->machine.two_launches = i % 2;
        run_server(cut_up, parts[i]);
        CHECK(difference(whole, cut_up) < 2e-4, "%d parts: differs by %g", (int)parts[i],
              difference(whole, cut_up));
    }
    free_server(whole);
    free_server(cut_up);
}

/* A table that leads nowhere leads no access out of the cache. */
static void test_wild_tables(void)
{
    server shape = shapes[0];
    shape.page = 16;
    const int32_t lengths[BATCH] = {700, 650, 16, 1};
    server *s = new_server(&shape, 400);
    fill(s, lengths, false);
    for (int64_t i = 0; i < s->batch * s->stride; i += 2)
        s->table[i] = i % 4 ? INT32_MIN : (int32_t)s->pages;
    run_server(s, 4);
    free_server(s);
}

/* ---- Caches of 8 bits ------------------------------------------------------------------------ */

enum { Q_HEADS = 6, KV_HEADS = 2, QUERIES = 2, SCALED_KEYS = 300, SCALED_DIM = 64 };

/* A cache whose keys and values have scales of their own. */
typedef struct scaled {
    fa_dtype type, cache;
    uint16_t q[QUERIES][Q_HEADS][SCALED_DIM], out[QUERIES][Q_HEADS][SCALED_DIM];
    uint8_t k[SCALED_KEYS][KV_HEADS][SCALED_DIM], v[SCALED_KEYS][KV_HEADS][SCALED_DIM];
    float k_scale[SCALED_KEYS][KV_HEADS], v_scale[SCALED_KEYS][KV_HEADS];
    int32_t length;
} scaled;

static double load_half(fa_dtype type, uint16_t x)
{
    return type == FA_FLOAT16 ? fa_half_to_float(x) : fa_bfloat_to_float(x);
}

static uint16_t store_half(fa_dtype type, double x)
{
    return type == FA_FLOAT16 ? fa_float_to_half((float)x) : fa_float_to_bfloat((float)x);
}

static double load_byte(fa_dtype type, uint8_t x)
{
    return type == FA_INT8 ? (int8_t)x : fa_e4m3_to_float(x);
}

/* Scales of values over 24 powers of two, of both signs, and zeros; behind the length, and for the
 * last key, which the first query does not see, NaN. All numbers of 8 bits are there. */
static void fill_scaled(scaled *s, fa_dtype type, fa_dtype cache)
{
    ref_random random = {(uint64_t)(10 * type + cache)};
    memset(s, POISON, sizeof *s);
    s->type = type;
    s->cache = cache;
    s->length = SCALED_KEYS - 37;
    for (int i = 0; i < QUERIES * Q_HEADS * SCALED_DIM; i++)
        (&s->q[0][0][0])[i] = store_half(type, ref_random_normal(&random));
    for (int j = 0; j < s->length; j++)
        for (int h = 0; h < KV_HEADS; h++) {
            const bool last = j == s->length - 1;
            for (int c = 0; c < SCALED_DIM; c++) {
                uint8_t k = (uint8_t)(j * 7 + h + c * 5), v = (uint8_t)(j + h * 3 + c * 11);
                if (cache == FA_FLOAT8_E4M3 && k % 128 == 127) k--;
                if (cache == FA_FLOAT8_E4M3 && v % 128 == 127) v--;
                if (cache == FA_FLOAT8_E4M3 && last) v = 127;
                s->k[j][h][c] = k;
                s->v[j][h][c] = v;
            }
            s->k_scale[j][h] = (float)(0.2 / (1 + j % 13)) / (cache == FA_INT8 ? 64 : 128);
            s->v_scale[j][h] = last ? NAN
                               : j % 17 == 16
                                   ? 0.0f
                                   : ldexpf(j % 2 ? -0.7f : 0.9f, (j * 5 + 11 * h) % 25 - 12);
        }
}

/* Query i of a head in double. scale: of what rounding weights may change. */
static void expect_scaled(const scaled *s, int i, int h, double out[SCALED_DIM],
                          double scale[SCALED_DIM])
{
    double p[SCALED_KEYS], top = -INFINITY, sum = 0, largest = 0;
    const int g = h / (Q_HEADS / KV_HEADS), keys = s->length - (QUERIES - 1 - i);
    for (int j = 0; j < keys; j++) {
        p[j] = 0;
        for (int c = 0; c < SCALED_DIM; c++)
            p[j] += load_half(s->type, s->q[i][h][c]) * load_byte(s->cache, s->k[j][g][c]);
        p[j] *= s->k_scale[j][g] / sqrt(SCALED_DIM);
        top = fmax(top, p[j]);
    }
    for (int j = 0; j < keys; j++) {
        p[j] = exp(p[j] - top);
        sum += p[j];
        largest = fmax(largest, p[j] * fabsf(s->v_scale[j][g]));
    }
    for (int c = 0; c < SCALED_DIM; c++) {
        out[c] = scale[c] = 0;
        for (int j = 0; j < keys; j++) {
            const double v = load_byte(s->cache, s->v[j][g][c]);
            out[c] += p[j] * s->v_scale[j][g] * v / sum;
            scale[c] += (p[j] * fabsf(s->v_scale[j][g]) + 0x1p-20 * largest) * fabs(v) / sum;
        }
    }
}

static void run_scaled(scaled *s, int64_t parts)
{
    char why[320] = "";
    machine m = {.number = parts};
    fa_cuda_plan plan = {0};
    fa_problem p;
    const fa_tensor q = fa_bshd(s->q, s->type, 1, QUERIES, Q_HEADS, SCALED_DIM);
    const fa_tensor out = fa_bshd(s->out, s->type, 1, QUERIES, Q_HEADS, SCALED_DIM);
    const fa_tensor k = fa_bshd(s->k, s->cache, 1, SCALED_KEYS, KV_HEADS, SCALED_DIM);
    const fa_tensor v = fa_bshd(s->v, s->cache, 1, SCALED_KEYS, KV_HEADS, SCALED_DIM);
    const fa_tensor k_scale = fa_bshd(s->k_scale, FA_FLOAT32, 1, SCALED_KEYS, KV_HEADS, 1);
    const fa_tensor v_scale = fa_bshd(s->v_scale, FA_FLOAT32, 1, SCALED_KEYS, KV_HEADS, 1);
    fa_options o = FA_OPTIONS_INIT;
    o.flags = FA_CAUSAL;
    o.seqlens_k = &s->length;
    o.k_scale = &k_scale;
    o.v_scale = &v_scale;
    const fa_arguments a = {.pass = FA_PASS_DECODE,
                            .device = FA_DEVICE_CUDA,
                            .q = &q,
                            .k = &k,
                            .v = &v,
                            .out = &out,
                            .options = &o};
    add_memory(&m.memory, "all", s, sizeof *s);
    CHECK(fa_problem_make(&a, &p) == FA_OK, "%s", fa_last_error());
    CHECK(fa_cuda_plan_make(&p, &devices[H200], &fa_cuda_decode, &plan, why, sizeof why) &&
              plan.family == &fa_cuda_decode,
          "%s", why);
    fa_cuda_cut_decode(&plan.launches[0], parts, 1);
    CHECK(run_plan(&m, &p, &plan.launches[0]), "memory beside the workspace was written");
}

static void check_scaled(const scaled *s)
{
    const double unit = s->type == FA_FLOAT16 ? 0x1p-11 : 0x1p-8;
    for (int i = 0; i < QUERIES * Q_HEADS; i++) {
        double want[SCALED_DIM], scale[SCALED_DIM];
        expect_scaled(s, i / Q_HEADS, i % Q_HEADS, want, scale);
        for (int c = 0; c < SCALED_DIM; c++) {
            const double x = load_half(s->type, s->out[i / Q_HEADS][i % Q_HEADS][c]);
            const double error = unit * fabs(want[c]) + 0x1p-10 * scale[c];
            CHECK(isnan(want[c]) ? isnan(x) : fabs(x - want[c]) <= error,
                  "%s, %s, query %d, head %d, column %d: %g, expected %g +- %g",
                  fa_dtype_name(s->type), fa_dtype_name(s->cache), i / Q_HEADS, i % Q_HEADS, c, x,
                  want[c], error);
        }
    }
}

static void test_scales(void)
{
    scaled *s = malloc(sizeof *s);
    if (!s) abort();
    for (int i = 0; i < 8; i++) {
        fill_scaled(s, i % 2 ? FA_FLOAT16 : FA_BFLOAT16, i / 2 % 2 ? FA_INT8 : FA_FLOAT8_E4M3);
        run_scaled(s, i / 4 ? 3 : 1);
        check_scaled(s);
    }
    free(s);
}

int main(int argc, char **argv)
{
    const int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : PROBLEMS);
    test_begin();
    const int done = run_random_problems(number, end, RANDOM_ANYTHING);
    const int quantized = run_random_problems(number, end, RANDOM_QUANTIZED);
    const int latent = run_random_problems(number, number + (end - number) / 3, RANDOM_LATENT);
    if (argc == 1) {
        test_pages();
        test_replay();
        test_parts();
        test_wild_tables();
        test_scales();
    }
    CHECK(done > 0 && quantized > 0 && latent > 0, "no problem was for these kernels");
    CHECK(mixed > 0 || argc > 1, "no problem was a mixed batch");
    if (argc > 2) {
        printf("%d, %d and %d problems, keys of %d cut, %d mixed\n", done, quantized, latent, cut,
               mixed);
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    }
    return test_end();
}
