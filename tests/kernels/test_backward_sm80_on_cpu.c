/*
 * backward_sm80, run on the host (cuda_on_cpu.h): random problems, compared with float64, with the
 * launches that the planner and the backend make for an H200, an A100 and a card with little shared
 * memory. What backward needs from forward comes from the CPU engine.
 *
 * Each problem runs twice, with different orders of the threads and blocks, and each result is
 * compared. Sums of dq and of dbias are added in another order then, so their last bits may differ;
 * all other results must be the same. With FA_DETERMINISTIC, in half of the problems, these must be,
 * too: then blocks run in order, the second time several side by side, so that they wait for each
 * other.
 *
 * Arguments: the first problem's number, how many, and of which kind (1: peaked rows; 2: float32 in
 * tf32; 3: by three products; 4 and 5: these two with sums in dq; 6: three products, weights
 * corrected; 7: the same with peaked rows), and "wide" for head dims above 256, in place of those
 * listed here. Then the runs of each variant are printed.
 */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "caller_memory.h"
#include "check.h"
#include "convert.h"
#include "cuda/family.h"
#include "cuda/plan_backward.h"
#include "cuda/plan_backward_sm80.h"
#include "cuda_on_cpu.h"
#include "gpus.h"
#include "hopper_units.h" /* semaphores */
#include "normalize.h"
#include "random_problem.h"
#include "sample.h"
#include "scalar.h"

/* Problems that take little time, and together have all variants, most of them twice. */
static const int64_t numbers[] = {
    1,    2,    3,    6,    7,    11,   28,   39,   65,   71,   79,   138,  238,  257,  275,
    276,  287,  297,  302,  318,  324,  343,  373,  385,  388,  396,  420,  439,  452,  465,
    489,  490,  495,  496,  512,  519,  529,  533,  549,  560,  582,  621,  643,  651,  653,
    655,  668,  694,  695,  708,  714,  749,  758,  760,  802,  803,  813,  868,  882,  886,
    905,  925,  945,  975,  1000, 1022, 1027, 1035, 1092, 1178, 1216, 1227, 1315, 1325, 1326,
    1345, 1375, 1381, 1396, 1409, 1436, 1486, 1613, 1719, 1796, 2037, 2248, 2771};

/* The same for float32 of precision tf32. */
static const int64_t tf32[] = {6,   34,  36,  37,  38,  39,  40,  50,  51,  79,  80,
                               85,  87,  139, 169, 171, 175, 179, 182, 199, 226, 252,
                               265, 271, 296, 308, 329, 332, 343, 367, 377, 396, 402,
                               439, 447, 465, 495, 496, 508, 523, 527, 549};

/* And for three products. */
static const int64_t float32[] = {103, 139, 164, 171, 182, 211, 226, 271, 308, 327, 329,
                                  333, 336, 343, 359, 362, 373, 396, 398, 402, 406};

/* Both with sums of dq in dq itself. */
static const int64_t tf32_in_place[] = {1,   2,   6,   11,  14,  17,  30,  37,  43,  44,  47,  50,
                                        51,  54,  55,  78,  79,  80,  87,  102, 103, 107, 109, 110,
                                        123, 128, 139, 155, 156, 171, 172, 173, 177, 182};
static const int64_t float32_in_place[] = {1,  2,  6,  14, 17, 32, 45, 47,  50,  51, 54,
                                           55, 65, 69, 76, 78, 87, 94, 102, 103, 105};

/* For three products, with weights corrected. */
static const int64_t corrected[] = {103, 139, 164, 171, 182, 211, 226, 271, 308, 327, 329,
                                    333, 336, 343, 359, 362, 373, 396, 398, 402, 406};

/* Rows that few keys dominate, without wide heads, which take long here. */
static const int64_t peaked[] = {0, 1, 8, 15, 29};

typedef struct parameters {
    fa_backward_params backward;
    fa_backward_sm80_params more;
} parameters;

/* The variants, one FORM(name) each: the build writes them. */
#define FORM(name)                                                                                 \
    void name(fa_backward_params p, fa_backward_sm80_params s);                                    \
    static void run_##name(const void *p)                                                          \
    {                                                                                              \
        const parameters *both = p;                                                                \
        name(both->backward, both->more);                                                          \
    }
#include "test_backward_sm80_on_cpu_forms.h"
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
SHARED(backward_dbias_clear)
SHARED(backward_dsinks)

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_backward_sm80_on_cpu_forms.h"
    FORM(backward_delta) FORM(backward_dbias_simt) FORM(backward_dbias_clear)
        FORM(backward_dsinks)};

static int runs[FA_VARIANTS];
static fa_cuda_device device;
static bool in_place; /* sums of dq are in dq itself */
static bool corrected_weights;

static int64_t blind_queries; /* those that were NaN */
static int rounded_otherwise; /* problems whose second run had other bits in dq */
static int ordered;           /* problems whose sums of dq have one order */
static int
    shared_queries[2]; /* those whose blocks share the queries of a head, in any order and in one */

/* The kinds of problems. */
typedef enum kind {
    ANY,
    PEAKED,        /* rows that few keys dominate */
    TF32,          /* float32 of precision tf32 */
    FLOAT32,       /* float32 by three products */
    TF32_IN_PLACE, /* with sums of dq in dq itself */
    FLOAT32_IN_PLACE,
    CORRECTED, /* by three products, with weights corrected */
    CORRECTED_PEAKED,
    KINDS
} kind;

/* Head dims above 256, for float32: this many problems from 0 on of each kind. */
static const int64_t wide_numbers = 16;
static const kind wide_kinds[] = {TF32, FLOAT32, TF32_IN_PLACE, FLOAT32_IN_PLACE, CORRECTED};

static double worst[KINDS]; /* the largest error, relative to the allowed one */

/* One run of a problem. */
typedef struct machine {
    int64_t number;
    bool otherwise; /* the second one */
    bool ordered;   /* sums of dq have one order */
    kind kind;
    bool wide;          /* head dims above 256, of float32 */
    bool compared;      /* this run's result is compared; later calls are batch items alone */
    char *first;        /* all buffers after the first run */
    ref_buffers memory; /* what kernels may access */
} machine;

/* ---- Launches -------------------------------------------------------------------------------- */

/* All orders; a slow warp, or one with slow lanes. If sums have one order, blocks of lower numbers
 * start first. */
static void vary(cuda_run *run, const machine *m)
{
    const uint64_t bits = (uint64_t)m->number * 0x9E3779B97F4A7C15u;
    run->backwards = (bits >> 61 & 1) != m->otherwise;
    run->last_block_first = m->otherwise && !m->ordered;
    if (!m->otherwise) return;
    if (m->ordered) run->together = 2 + (unsigned)(bits >> 45 & 3) % 3;
    run->slow_warp = (unsigned)(bits >> 50 & 1023) % (run->threads / 32);
    run->slow_lanes = ~0u;
}

static void launch(const machine *m, const fa_cuda_plan_launch *l, const parameters *params)
{
    char name[200];
    cuda_run run = {.name = name,
                    .kernel = kernels[l->variant],
                    .memory = &m->memory,
                    .parameters = params,
                    .grid = l->grid,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes,
                    .units = &hopper_units};
    if (!run.kernel) abort();
    vary(&run, m);
    snprintf(name, sizeof name, "number %lld: %s, %s, lanes %x of warp %u slow",
             (long long)m->number, fa_variants[l->variant].name,
             run.backwards ? "backwards" : "forwards", run.slow_lanes, run.slow_warp);
    runs[l->variant]++;
    cuda_run_kernel(&run);
}

static bool is_shared(const fa_cuda_plan_launch *l)
{
    return l->variant == FA_VARIANT_backward_delta ||
           l->variant == FA_VARIANT_backward_dbias_simt ||
           l->variant == FA_VARIANT_backward_dbias_clear ||
           l->variant == FA_VARIANT_backward_dsinks;
}

static void run_launches(const machine *m, const fa_problem *p, const fa_cuda_plan *plan)
{
    static parameters params;
    for (int i = 0; i < plan->count; i++) {
        const fa_cuda_plan_launch *l = &plan->launches[i];
        if (l->idle) continue;
        fa_cuda_set_backward_params(p, l, &params.backward);
        if (!is_shared(l)) fa_cuda_backward_sm80_params(p, l, &params.more);
        launch(m, l, &params);
    }
}

static fa_status run_in_workspace(machine *m, fa_problem *p, const fa_cuda_plan *plan,
                                  char *message, size_t size)
{
    begin_workspace(&m->memory, p, plan->workspace_bytes);
    run_launches(m, p, plan);
    if (end_workspace(&m->memory, p)) return FA_OK;
    snprintf(message, size, "memory beside the workspace was written");
    return (fa_status)RANDOM_WRONG;
}

/* ---- Problems -------------------------------------------------------------------------------- */

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
        const bool is_sum = strcmp(b->name, "dq") == 0 || strcmp(b->name, "dbias") == 0;
        if (is_sum && !m->ordered) {
            rounded_otherwise++;
            continue;
        }
        snprintf(message, size, "a second run left other bits in %s", b->name);
        status = (fa_status)RANDOM_WRONG;
    }
    return status;
}

/* The problem of backward, and its plan by the kernel, if the kernel supports it. */
static fa_status make_plan(const random_call *call, const fa_gradients *gradients,
                           fa_options *options, fa_problem *p, fa_cuda_plan *plan, char *message,
                           size_t size)
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
    const fa_cuda_family *family = call->q.dtype != FA_FLOAT32 ? &fa_cuda_backward_sm80
                                   : in_place                  ? &fa_cuda_backward_tf32_in_place
                                   : corrected_weights         ? &fa_cuda_backward_tf32x3_corrected
                                   : call->options.precision == FA_PRECISION_TF32
                                       ? &fa_cuda_backward_tf32
                                       : &fa_cuda_backward_tf32x3;
    return fa_cuda_plan_make(p, &device, family, plan, message, size) && plan->family == family
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

static fa_status attend(machine *m, const random_call *call, char *message, size_t size)
{
    if (m->otherwise != call->run) m->compared = false;
    m->otherwise = call->run;
    fa_options options = call->options;
    fa_problem p;
    fa_cuda_plan plan;
    if (m->number / 8 % 2) options.flags |= FA_DETERMINISTIC;
    fa_status status = make_plan(call, &call->gradients, &options, &p, &plan, message, size);
    if (status != FA_OK) return status;
    m->ordered = p.deterministic || p.batch_invariant;
    if (m->ordered && m->otherwise) ordered++;
    for (int i = 0; i < plan.count; i++)
        shared_queries[m->ordered] += plan.launches[i].backward_sm80.query_parts > 1;
    m->memory = *call->buffers;
    char *const kept = keep_queries(call->buffers, NULL);
    poison_blind_queries(call);
    status = run_in_workspace(m, &p, &plan, message, size);
    free(keep_queries(call->buffers, kept));
    return status == FA_OK ? compare_runs(m, call, message, size) : status;
}

static bool is_peaked(const machine *m) { return m->kind == PEAKED || m->kind == CORRECTED_PEAKED; }

static bool wants(void *context, const random_call *call)
{
    const machine *m = context;
    char message[320];
    fa_options options = call->options;
    fa_problem p;
    fa_cuda_plan plan;
    if (call->pass != RANDOM_BACKWARD) return false;
    if (m->number / 8 % 2) options.flags |= FA_DETERMINISTIC;
    const fa_status status =
        make_plan(call, &call->gradients, &options, &p, &plan, message, sizeof message);
    if (status != FA_OK) return status != FA_ERROR_UNSUPPORTED; /* attend gives the reason */
    return sample_takes(&p, &plan, is_peaked(m));
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
    static const random_focus focuses[] = {RANDOM_ANYTHING, RANDOM_TAILS,   RANDOM_MASKS,
                                           RANDOM_UNUSED,   RANDOM_LENGTHS, RANDOM_WIDE,
                                           RANDOM_EMPTY,    RANDOM_STRIDES, RANDOM_INVARIANCE,
                                           RANDOM_DROPOUT,  RANDOM_TAILS};
    const random_focus focus = focuses[m->number % (int64_t)(sizeof focuses / sizeof focuses[0])];
    /* The number determines the head dim of RANDOM_TAILS: all widths, not only the first ones. */
    const int64_t problem =
        focus == RANDOM_TAILS && !is_peaked(m) ? m->number * 37 % 256 : m->number;
    random_settings settings = {.device = FA_DEVICE_CUDA,
                                .tiles = is_peaked(m) || m->number % 16 == 4,
                                .one_pass = true,
                                .pass = RANDOM_BACKWARD,
                                .focus = focus,
                                .all_passes = true,
                                .backward_alone = true,
                                .runs = 2,
                                .attend = compute,
                                .wants = wants,
                                .context = m};
    static const int gpus[] = {H200, A100, H200, RTX_4090};
    device = devices[gpus[m->number / 8 % 4]];
    if (m->wide) device = devices[H200], settings.wide_heads = true;
    if (m->number / 16 % 2) device.multiprocessors = 3;
    if (is_peaked(m)) settings.focus = RANDOM_PEAKED, settings.few_queries = true;
    if (m->kind >= TF32) {
        settings.one_dtype = true;
        settings.dtype = FA_FLOAT32;
        settings.precision =
            m->kind == TF32 || m->kind == TF32_IN_PLACE ? FA_PRECISION_TF32 : FA_PRECISION_FLOAT32;
    }
    in_place = m->kind == TF32_IN_PLACE || m->kind == FLOAT32_IN_PLACE;
    corrected_weights = m->kind >= CORRECTED;
    random_problem_run((uint64_t)problem, &settings, &result);
    if (result.status == FA_ERROR_UNSUPPORTED) return false;
    worst[m->kind] = fmax(worst[m->kind], result.report.worst);
    CHECK(result.report.ok, "number %lld, run %d: %s\n  %s", (long long)m->number, m->otherwise + 1,
          result.report.message, result.description);
    return result.report.ok;
}

/* ---- Problems made by hand ------------------------------------------------------------------- */

/* All queries and all keys are equal, so that gradients are known: each key has the weight
 * 1 / ROWS. */
enum { ROWS = 40, COLUMNS = 64 };

/* As wide as the widest type. */
typedef uint32_t elements[ROWS * COLUMNS];

static struct {
    elements q, k, v, out, dout, dq, dk, dv;
    float lse[ROWS], sink; /* -infinity: none */
    uint8_t mask[ROWS * ROWS];
    int32_t length;
} hand;

static fa_dtype hand_dtype;         /* float32: sums of dq are in dq itself */
static fa_precision hand_precision; /* of float32 */

static fa_tensor tensor_of(uint32_t *data)
{
    return fa_bshd(data, hand_dtype, 1, ROWS, 1, COLUMNS);
}

static void set(uint32_t *to, int i, float x)
{
    const fa_tensor t = tensor_of(to);
    ref_store(&t, 0, i / COLUMNS, 0, i % COLUMNS, (double)x);
}

static float get(uint32_t *from, int i)
{
    const fa_tensor t = tensor_of(from);
    return (float)ref_load(&t, 0, i / COLUMNS, 0, i % COLUMNS);
}

static void fill(uint32_t *to, float x)
{
    for (int i = 0; i < ROWS * COLUMNS; i++) set(to, i, x);
}

/* Scores of -128 and lower are far below the 0 of a row of zeros after the last key. */
static void make_hand(float key)
{
    fill(hand.q, 4);
    fill(hand.k, key);
    fill(hand.v, 1);
    fill(hand.out, 1);
    fill(hand.dout, 1);
    hand.sink = -INFINITY;
    for (int i = 0; i < ROWS; i++) hand.lse[i] = 4 * key * COLUMNS / 8 + logf(ROWS);
    memset(hand.mask, 1, sizeof hand.mask);
}

static void run_hand(bool masked, const int32_t *seqlens_q)
{
    char message[320] = "";
    const fa_tensor mask = {.data = hand.mask,
                            .dtype = FA_BOOL,
                            .shape = {1, 1, ROWS, ROWS},
                            .stride = {0, 0, ROWS, 1}};
    const fa_gradients gradients = {.size = sizeof gradients,
                                    .dout = tensor_of(hand.dout),
                                    .dq = tensor_of(hand.dq),
                                    .dk = tensor_of(hand.dk),
                                    .dv = tensor_of(hand.dv)};
    fa_options options = FA_OPTIONS_INIT;
    options.precision = hand_precision;
    if (masked) options.mask = &mask;
    if (hand.sink > -INFINITY) options.sinks = &hand.sink;
    options.seqlens_q = seqlens_q;
    const random_call call = {.q = tensor_of(hand.q),
                              .k = tensor_of(hand.k),
                              .v = tensor_of(hand.v),
                              .out = tensor_of(hand.out),
                              .lse = hand.lse,
                              .options = options};
    machine m = {.memory = {.count = 1}};
    fa_problem p;
    fa_cuda_plan plan;
    m.memory.list[0] = (ref_buffer){.name = "arrays", .data = (char *)&hand, .bytes = sizeof hand};
    device = devices[H200];
    const fa_status status =
        make_plan(&call, &gradients, &options, &p, &plan, message, sizeof message);
    CHECK(status == FA_OK && run_in_workspace(&m, &p, &plan, message, sizeof message) == FA_OK,
          "%s", message);
}

/* Weights of rows after the last key would be infinite. */
static void test_low_scores(void)
{
    for (int masked = 0; masked < 2; masked++) {
        make_hand(-4);
        run_hand(masked, NULL);
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            const float dq = get(hand.dq, i), dk = get(hand.dk, i), dv = get(hand.dv, i);
            CHECK(fabsf(dq) < 0.02f && fabsf(dk) < 0.02f && fabsf(dv - 1) < 0.002f,
                  "masked %d, %d: %g, %g, %g", masked, i, dq, dk, dv);
        }
    }
}

/* An infinite key that a query sees is not ignored if keys are searched for hidden ones; a hidden
 * one is ignored. */
static void test_infinite_key(void)
{
    for (int hidden = 0; hidden < 2; hidden++) {
        make_hand(0.125f);
        set(hand.k, 3 * COLUMNS, INFINITY);
        for (int i = 0; i < ROWS; i++) {
            hand.lse[i] = hidden ? 4 + logf(ROWS - 1) : INFINITY;
            hand.mask[i * ROWS + 3] = !hidden;
        }
        run_hand(true, NULL);
        for (int i = 0; i < ROWS * COLUMNS; i++)
            CHECK(isnan(get(hand.dq, i)) == !hidden, "hidden %d: dq %d is %g", hidden, i,
                  (double)get(hand.dq, i));
    }
}

/* Finite float32 numbers whose scores are infinite: gradients are NaN, because the log-sum-exp is
 * infinite. */
static void test_infinite_scores(void)
{
    make_hand(0.125f);
    fill(hand.q, 1e20f);
    for (int c = 0; c < COLUMNS; c++) set(hand.k, 3 * COLUMNS + c, 1e20f);
    for (int i = 0; i < ROWS; i++) hand.lse[i] = INFINITY;
    run_hand(false, NULL);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        CHECK(isnan(get(hand.dq, i)), "dq %d is %g", i, (double)get(hand.dq, i));
    for (int i = 3 * COLUMNS; i < 4 * COLUMNS; i++)
        CHECK(isnan(get(hand.dv, i)), "dv %d is %g", i, (double)get(hand.dv, i));
}

/* Rows after the last query get zeros, whatever the keys are. */
static void test_rows_behind(void)
{
    make_hand(0.125f);
    set(hand.k, 3 * COLUMNS, INFINITY);
    hand.length = 30;
    for (int i = 0; i < ROWS; i++) hand.lse[i] = i < hand.length ? INFINITY : -INFINITY;
    fill(hand.dq, 7);
    run_hand(false, &hand.length);
    for (int i = hand.length * COLUMNS; i < ROWS * COLUMNS; i++)
        CHECK(get(hand.dq, i) == 0, "dq %d is %g", i, (double)get(hand.dq, i));
}

/* A log-sum-exp with a rounding error of the scores does not change gradients. One that differs by
 * more covers other keys as well, and does. With a sink, keys have half of the weight. */
static void test_corrected_weights(void)
{
    static const float errors[] = {0, 0x1p-22f, -0x1p-22f, 0x1p-12f};
    hand_dtype = FA_FLOAT32;
    hand_precision = FA_PRECISION_FLOAT32;
    for (int i = 0; i < 16; i++) {
        const bool masked = i % 2, sink = i / 2 % 2;
        const float error = errors[i / 4];
        make_hand(2);
        const double lse = 64 + log(ROWS), joint = lse + (sink ? log(2) : 0);
        hand.sink = sink ? (float)lse : -INFINITY;
        for (int row = 0; row < ROWS; row++) hand.lse[row] = (float)joint * (1 + error);
        const bool rounding = fabsf(error) < 0x1p-20f;
        const double expected = exp(lse - (rounding ? joint : (double)hand.lse[0]));
        corrected_weights = true;
        run_hand(masked, NULL);
        const double dv = (double)get(hand.dv, 0);
        CHECK(fabs(dv - expected) < (rounding ? 4e-7 : 1e-5),
              "masked %d, sink %d, error %g: dv is %g + %g", masked, sink, (double)error, expected,
              dv - expected);
        corrected_weights = false;
        run_hand(masked, NULL);
        CHECK(error == 0 || fabs((double)get(hand.dv, 0) - exp(lse - joint)) > 5e-6,
              "masked %d, sink %d, error %g: corrected unasked", masked, sink, (double)error);
    }
    hand.sink = -INFINITY;
}

/* Options of test_row_sums, in addition to plain attention. */
typedef enum row_option {
    ROW_PLAIN,
    ROW_CAUSAL,
    ROW_WINDOW,
    ROW_SOFTCAP,
    ROW_ALIBI,
    ROW_BIAS,
    ROW_MASK,
    /* One key with nearly all the weight, many with weights that a float32 sum would lose. */
    ROW_SMALL,
    ROW_OPTIONS
} row_option;

static void set_row_option(fa_options *o, row_option option, const fa_tensor *scores)
{
    /* Small: log-sum-exps far below the scores would have errors that are larger than those that
     * are corrected. */
    static const float slope = 0.0625f;
    if (option == ROW_CAUSAL) o->flags |= FA_CAUSAL;
    if (option == ROW_WINDOW) o->flags |= FA_CAUSAL | FA_WINDOW, o->window_left = 90;
    if (option == ROW_SOFTCAP) o->softcap = 40;
    if (option == ROW_ALIBI) o->alibi_slopes = &slope;
    if (option == ROW_BIAS) o->bias = scores;
    if (option == ROW_MASK) o->mask = scores;
}

/* dO has a 1 in its own column for each query. So the sum of dV over the keys is, in that column,
 * the sum of the query's weights: 1, whatever the scores are, also if the log-sum-exp has a
 * rounding error. */
static void test_row_sums(int dim, row_option option)
{
    enum { N_Q = 80, N_K = 2100, MOST = 512 };
    static struct {
        float q[N_Q * MOST], k[N_K * MOST], v[N_K * MOST], out[N_Q * MOST], dout[N_Q * MOST];
        float dq[N_Q * MOST], dk[N_K * MOST], dv[N_K * MOST], lse[N_Q], bias[N_Q * N_K];
        uint8_t mask[N_Q * N_K];
    } x;
    /* With few bits, so that scores are exact: logits of 40, and of 20.5 for the others. */
    static const float keys[][2] = {{5, 2.5625f},
                                    {3.5625f, 1.8125f},
                                    {2.5f, 1.28125f},
                                    {2.0625f, 1.046875f},
                                    {1.78125f, 0.90625f}};
    const int n_q = dim < N_Q ? dim : N_Q, n_k = option == ROW_SMALL ? N_K : 230;
    const bool is_mask = option == ROW_MASK;
    char message[320] = "";
    ref_random random = {(uint64_t)(dim + (int)option)};
    fa_options options = FA_OPTIONS_INIT;
    fa_problem p;
    fa_cuda_plan plan;
    memset(&x, 0, sizeof x);
    for (int i = 0; i < n_q * dim; i++)
        x.q[i] = option == ROW_SMALL ? 1 : 6 * (float)ref_random_normal(&random);
    for (int i = 0; i < n_k * dim; i++)
        x.k[i] = option == ROW_SMALL ? (i < dim ? keys[dim / 128][0] : keys[dim / 128][1])
                                     : (float)ref_random_normal(&random);
    for (int i = 0; i < n_k * dim; i++) x.v[i] = (float)ref_random_normal(&random);
    for (int i = 0; i < n_q; i++) x.dout[i * dim + i] = 1;
    for (int i = 0; i < n_q * n_k; i++) {
        x.bias[i] = 5 * (float)ref_random_normal(&random);
        x.mask[i] = i % n_k == 0 || ref_random_bits(&random) % 4 == 0;
    }
    const fa_tensor scores = {.data = is_mask ? (void *)x.mask : x.bias,
                              .dtype = is_mask ? FA_BOOL : FA_FLOAT32,
                              .shape = {1, 1, n_q, n_k},
                              .stride = {0, 0, n_k, 1}};
    set_row_option(&options, option, &scores);
    const fa_tensor q = fa_bshd(x.q, FA_FLOAT32, 1, n_q, 1, dim),
                    k = fa_bshd(x.k, FA_FLOAT32, 1, n_k, 1, dim),
                    v = fa_bshd(x.v, FA_FLOAT32, 1, n_k, 1, dim),
                    out = fa_bshd(x.out, FA_FLOAT32, 1, n_q, 1, dim);
    const fa_gradients gradients = {.size = sizeof gradients,
                                    .dout = fa_bshd(x.dout, FA_FLOAT32, 1, n_q, 1, dim),
                                    .dq = fa_bshd(x.dq, FA_FLOAT32, 1, n_q, 1, dim),
                                    .dk = fa_bshd(x.dk, FA_FLOAT32, 1, n_k, 1, dim),
                                    .dv = fa_bshd(x.dv, FA_FLOAT32, 1, n_k, 1, dim)};
    options.device = FA_DEVICE_CPU;
    CHECK(fa_forward(&q, &k, &v, &out, x.lse, &options) == FA_OK, "%s", fa_last_error());
    options.device = FA_DEVICE_CUDA;
    for (int i = 0; i < n_q; i++)
        x.lse[i] += fmaxf(1, fabsf(x.lse[i])) * (i % 2 ? 0x1p-22f : -0x1p-22f);
    const random_call call = {.q = q, .k = k, .v = v, .out = out, .lse = x.lse, .options = options};
    machine m = {.memory = {.count = 1}};
    m.memory.list[0] = (ref_buffer){.name = "arrays", .data = (char *)&x, .bytes = sizeof x};
    device = devices[H200];
    corrected_weights = true;
    const fa_status status =
        make_plan(&call, &gradients, &options, &p, &plan, message, sizeof message);
    CHECK(status == FA_OK && run_in_workspace(&m, &p, &plan, message, sizeof message) == FA_OK,
          "%s", message);
    corrected_weights = false;
    for (int i = 0; i < n_q; i++) {
        double sum = 0;
        for (int j = 0; j < n_k; j++) sum += (double)x.dv[j * dim + i];
        CHECK(fabs(sum - 1) < 3e-7, "d %d, option %d, query %d: weights are together 1 + %g", dim,
              (int)option, i, sum - 1);
    }
}

/* A block has more tiles of queries than it checks together, and some have large scores. Each head
 * has a tile with one query. The weights of a query with large scores add up to 1; those of the
 * others follow the log-sum-exp, which has an error. biased: a bias makes the logits of every second
 * query with large scores 2, so that only the norms of rows tell. */
static void test_many_tiles(bool biased)
{
    enum { HEADS = 100, DIM = 64, N_K = 3 };
    static struct {
        float q[HEADS * DIM], out[HEADS * DIM], dout[HEADS * DIM], dq[HEADS * DIM], lse[HEADS];
        float k[N_K * HEADS * DIM], v[N_K * HEADS * DIM], dk[N_K * HEADS * DIM],
            dv[N_K * HEADS * DIM], bias[HEADS * N_K];
    } x;
    const float error = biased ? 3e-6f : 1e-5f;
    char message[320] = "";
    ref_random random = {5};
    fa_options options = FA_OPTIONS_INIT;
    fa_problem p;
    fa_cuda_plan plan;
    memset(&x, 0, sizeof x);
    for (int i = 0; i < N_K * HEADS * DIM; i++) x.k[i] = 2;
    for (int head = 0; head < HEADS; head++) {
        const float q = ref_random_bits(&random) % 2 ? 4 : 0;
        for (int i = 0; i < DIM; i++) x.q[head * DIM + i] = q;
        const float hidden = biased && head % 2 && q > 0 ? 2 - 2 * q * DIM / 8 : 0;
        x.dout[head * DIM] = 1;
        x.lse[head] = 2 * q * DIM / 8 + hidden + logf(N_K) - error;
        for (int j = 0; j < N_K; j++) x.bias[head * N_K + j] = hidden;
    }
    const fa_tensor bias = {.data = x.bias,
                            .dtype = FA_FLOAT32,
                            .shape = {1, HEADS, 1, N_K},
                            .stride = {0, N_K, N_K, 1}};
    if (biased) options.bias = &bias;
    const fa_tensor q = fa_bshd(x.q, FA_FLOAT32, 1, 1, HEADS, DIM),
                    k = fa_bshd(x.k, FA_FLOAT32, 1, N_K, HEADS, DIM),
                    v = fa_bshd(x.v, FA_FLOAT32, 1, N_K, HEADS, DIM),
                    out = fa_bshd(x.out, FA_FLOAT32, 1, 1, HEADS, DIM);
    const fa_gradients gradients = {.size = sizeof gradients,
                                    .dout = fa_bshd(x.dout, FA_FLOAT32, 1, 1, HEADS, DIM),
                                    .dq = fa_bshd(x.dq, FA_FLOAT32, 1, 1, HEADS, DIM),
                                    .dk = fa_bshd(x.dk, FA_FLOAT32, 1, N_K, HEADS, DIM),
                                    .dv = fa_bshd(x.dv, FA_FLOAT32, 1, N_K, HEADS, DIM)};
    const random_call call = {.q = q, .k = k, .v = v, .out = out, .lse = x.lse, .options = options};
    machine m = {.memory = {.count = 1}};
    m.memory.list[0] = (ref_buffer){.name = "arrays", .data = (char *)&x, .bytes = sizeof x};
    device = devices[H200];
    device.multiprocessors = 1;
    corrected_weights = true;
    const fa_status status =
        make_plan(&call, &gradients, &options, &p, &plan, message, sizeof message);
    CHECK(status == FA_OK && run_in_workspace(&m, &p, &plan, message, sizeof message) == FA_OK,
          "%s", message);
    corrected_weights = false;
    CHECK(plan.launches[1].tasks > 32 * (int64_t)plan.launches[1].grid, "%u blocks",
          plan.launches[1].grid);
    for (int head = 0; head < HEADS; head++) {
        const double expected = x.q[head * DIM] > 0 ? 1 : exp((double)error);
        double sum = 0;
        for (int j = 0; j < N_K; j++) sum += (double)x.dv[(j * HEADS + head) * DIM];
        CHECK(fabs(sum - expected) < 5e-7, "biased %d, head %d: weights are together %g + %g",
              biased, head, expected, sum - expected);
    }
}

/* ---- Rows of different sizes ----------------------------------------------------------------- */

/* Float32 operands are multiplied as float16 numbers times powers of two. Each row of each gradient
 * must have small errors, whatever the sizes of the other rows are. */
typedef enum uneven_case {
    HUGE_MASKED_KEY, /* that a mask hides from all queries */
    HUGE_BIASED_KEY, /* that a bias hides */
    HUGE_FUTURE_KEY, /* that a causal mask hides from some */
    UNEVEN_ROWS,     /* sizes of rows differ by powers of two, and some rows are 0 */
    LARGE_QUERIES,   /* times 1e18, and keys times 1e-18 */
    SMALL_QUERIES,   /* the other way round */
    LARGE_VALUES,    /* values and dO times 1e18 */
    SMALL_VALUES,    /* values and dO times 1e-15 */
    LARGE_DOUT,      /* dO times 1e18, values times 1e-18 */
    UNATTENDED_KEY,  /* with weights of 1e-19 */
    LARGE_LOGITS,    /* some ten million: only finiteness is tested */
    TINY_QUERIES,    /* 2^-92, and every second key 2^112, others 2^-92 */
    HUGE_QUERIES,    /* the other way round */
    TINY_DOUT,       /* the same for dO and values */
    HUGE_DOUT,
    /* Keys and queries are orthogonal and huge; values and dO are so small that dP is near the
     * smallest float. */
    ORTHOGONAL_ROWS,
    UNEVEN_CASES
} uneven_case;

enum { UNEVEN_Q = 40, UNEVEN_K = 72, UNEVEN_DIM = 512, HUGE_KEY = 37 };

static struct {
    float q[UNEVEN_Q * UNEVEN_DIM], k[UNEVEN_K * UNEVEN_DIM], v[UNEVEN_K * UNEVEN_DIM];
    float out[UNEVEN_Q * UNEVEN_DIM], dout[UNEVEN_Q * UNEVEN_DIM], lse[UNEVEN_Q];
    float dq[UNEVEN_Q * UNEVEN_DIM], dk[UNEVEN_K * UNEVEN_DIM], dv[UNEVEN_K * UNEVEN_DIM];
    float bias[UNEVEN_Q * UNEVEN_K];
    uint8_t mask[UNEVEN_Q * UNEVEN_K];
} uneven;

static void fill_rows(ref_random *random, float *rows, int n, int dim, double scale, int bits)
{
    for (int i = 0; i < n; i++) {
        const int shift =
            bits ? (int)(ref_random_bits(random) % (unsigned)(2 * bits + 1)) - bits : 0;
        for (int c = 0; c < dim; c++)
            rows[i * dim + c] = (float)(ldexp(scale, shift) * ref_random_normal(random));
    }
}

static void set_row(float *rows, int row, int dim, float x)
{
    for (int c = 0; c < dim; c++) rows[row * dim + c] = x;
}

/* Multiplies a row by a power of two. */
static void shift_row(float *rows, int row, int dim, int bits)
{
    for (int c = 0; c < dim; c++) rows[row * dim + c] = ldexpf(rows[row * dim + c], bits);
}

/* Rows of very different sizes. Their products are ordinary numbers, or nearly 0. */
static void make_far_rows(int dim, uneven_case of)
{
    const bool queries = of == TINY_QUERIES || of == HUGE_QUERIES;
    const bool tiny = of == TINY_QUERIES || of == TINY_DOUT;
    float *x = queries ? uneven.q : uneven.dout, *y = queries ? uneven.k : uneven.v;
    float *few = tiny ? y : x, *many = tiny ? x : y;
    const int num_few = tiny ? UNEVEN_K : UNEVEN_Q, num_many = tiny ? UNEVEN_Q : UNEVEN_K;
    for (int i = 0; i < num_many; i++) shift_row(many, i, dim, -92);
    for (int i = 0; i < num_few; i++) shift_row(few, i, dim, i % 2 ? -92 : 112);
}

/* A query has only its first column, a key only its second. */
static void make_orthogonal_rows(int dim)
{
    for (int i = 0; i < UNEVEN_Q * dim; i++)
        uneven.q[i] = i % dim == 0 ? ldexpf(uneven.q[i], 100) : 0;
    for (int i = 0; i < UNEVEN_K * dim; i++)
        uneven.k[i] = i % dim == 1 ? ldexpf(uneven.k[i], 100) : 0;
    for (int i = 0; i < UNEVEN_Q; i++) shift_row(uneven.dout, i, dim, -62);
    for (int i = 0; i < UNEVEN_K; i++) shift_row(uneven.v, i, dim, -62);
}

static void make_uneven(int dim, uneven_case of)
{
    ref_random random = {(uint64_t)(100 * dim + (int)of)};
    const double q = of == LARGE_QUERIES ? 1e18 : of == SMALL_QUERIES ? 1e-18 : 1;
    const double v = of == LARGE_VALUES   ? 1e18
                     : of == SMALL_VALUES ? 1e-15
                     : of == LARGE_DOUT   ? 1e-18
                                          : 1;
    const double dout = of == LARGE_DOUT ? 1e18 : v;
    const bool rows = of == UNEVEN_ROWS;
    memset(&uneven, 0, sizeof uneven);
    memset(uneven.mask, 1, sizeof uneven.mask);
    fill_rows(&random, uneven.q, UNEVEN_Q, dim,
              of == LARGE_LOGITS ? 1e6
              : rows             ? 0x1p-20
                                 : q,
              rows ? 20 : 0);
    fill_rows(&random, uneven.k, UNEVEN_K, dim, rows ? 0x1p-20 : 1 / q, rows ? 20 : 0);
    fill_rows(&random, uneven.v, UNEVEN_K, dim, v, rows ? 20 : 0);
    fill_rows(&random, uneven.dout, UNEVEN_Q, dim, dout, rows ? 40 : 0);
    if (rows)
        set_row(uneven.q, 3, dim, 0), set_row(uneven.k, 4, dim, 0), set_row(uneven.dout, 5, dim, 0);
    if (of >= TINY_QUERIES && of <= HUGE_DOUT) make_far_rows(dim, of);
    if (of == ORTHOGONAL_ROWS) make_orthogonal_rows(dim);
    if (of <= HUGE_FUTURE_KEY) {
        if (of != HUGE_FUTURE_KEY) set_row(uneven.k, HUGE_KEY, dim, 1e30f);
        set_row(uneven.v, HUGE_KEY, dim, of == HUGE_FUTURE_KEY ? 1e12f : -1e30f);
        for (int i = 0; i < UNEVEN_Q * dim; i++)
            uneven.dout[i] = fabsf(uneven.dout[i]); /* so that dP of the key is not a difference */
    }
    if (of == UNATTENDED_KEY) { /* logits of -44 */
        for (int i = 0; i < UNEVEN_Q; i++) uneven.q[i * dim] = 30;
        set_row(uneven.k, HUGE_KEY, dim, 0);
        uneven.k[HUGE_KEY * dim] = (float)(-44 * sqrt(dim) / 30);
    }
    for (int i = 0; i < UNEVEN_Q; i++) {
        if (of == HUGE_MASKED_KEY) uneven.mask[i * UNEVEN_K + HUGE_KEY] = 0;
        if (of == HUGE_BIASED_KEY) uneven.bias[i * UNEVEN_K + HUGE_KEY] = -INFINITY;
    }
}

/* The largest error of a row, relative to its size, or to `least` if that is larger; 1 if both are
 * 0, infinity if a number is not finite. */
static double find_row_error(const float *rows, const double *expected, int n, int dim,
                             double least)
{
    double worst_row = 0;
    for (int i = 0; i < n; i++) {
        double error = 0, size = 0;
        for (int c = 0; c < dim; c++) {
            error = fmax(error, fabs((double)rows[i * dim + c] - expected[i * dim + c]));
            size = fmax(size, fabs(expected[i * dim + c]));
            if (!isfinite(rows[i * dim + c])) return INFINITY;
        }
        size = fmax(size, least);
        if (error > 0) worst_row = fmax(worst_row, size > 0 ? error / size : 1);
    }
    return worst_row;
}

/* In weights, errors of scores are multiplied by the scores' size: UNATTENDED_KEY has scores of 44.
 * Large logits only need to give finite results. */
static double allow_row_error(uneven_case of, fa_precision precision)
{
    const double rounding = precision == FA_PRECISION_TF32 ? 0x1p-11 : 0x1p-22;
    if (of == LARGE_LOGITS) return DBL_MAX;
    if (of == ORTHOGONAL_ROWS)
        return rounding * 512 + 0x1p-6; /* one column, sums near 0; dP has few bits */
    return rounding * (of == UNATTENDED_KEY                       ? 4 * 44
                       : of == TINY_QUERIES || of == HUGE_QUERIES ? 64
                                                                  : 16);
}

/* Computes out and lse, and the expected gradients, by the reference. */
static void attend_uneven(const ref_inputs *in, const fa_tensor *dout, ref_gradients *exact)
{
    ref_array out, lse;
    ref_forward(in, &out, &lse);
    for (int64_t i = 0; i < out.shape[1] * out.shape[3]; i++) uneven.out[i] = (float)out.value[i];
    for (int i = 0; i < UNEVEN_Q; i++) uneven.lse[i] = (float)lse.value[i];
    ref_array_free(&out);
    ref_array_free(&lse);
    ref_backward(in, dout, NULL, NULL, exact);
}

static void run_uneven(int dim, uneven_case of, fa_precision precision, ref_gradients *exact)
{
    const bool is_mask = of == HUGE_MASKED_KEY;
    const fa_tensor scores = {.data = is_mask ? (void *)uneven.mask : uneven.bias,
                              .dtype = is_mask ? FA_BOOL : FA_FLOAT32,
                              .shape = {1, 1, UNEVEN_Q, UNEVEN_K},
                              .stride = {0, 0, UNEVEN_K, 1}};
    const fa_gradients gradients = {.size = sizeof gradients,
                                    .dout = fa_bshd(uneven.dout, FA_FLOAT32, 1, UNEVEN_Q, 1, dim),
                                    .dq = fa_bshd(uneven.dq, FA_FLOAT32, 1, UNEVEN_Q, 1, dim),
                                    .dk = fa_bshd(uneven.dk, FA_FLOAT32, 1, UNEVEN_K, 1, dim),
                                    .dv = fa_bshd(uneven.dv, FA_FLOAT32, 1, UNEVEN_K, 1, dim)};
    fa_options options = FA_OPTIONS_INIT;
    options.precision = precision;
    if (is_mask) options.mask = &scores;
    if (of == HUGE_BIASED_KEY) options.bias = &scores;
    if (of == HUGE_FUTURE_KEY) options.flags |= FA_CAUSAL;
    if (of == TINY_QUERIES || of == HUGE_QUERIES) options.scale = 0x1p-20f / sqrtf((float)dim);
    const random_call call = {.q = fa_bshd(uneven.q, FA_FLOAT32, 1, UNEVEN_Q, 1, dim),
                              .k = fa_bshd(uneven.k, FA_FLOAT32, 1, UNEVEN_K, 1, dim),
                              .v = fa_bshd(uneven.v, FA_FLOAT32, 1, UNEVEN_K, 1, dim),
                              .out = fa_bshd(uneven.out, FA_FLOAT32, 1, UNEVEN_Q, 1, dim),
                              .lse = uneven.lse,
                              .options = options};
    char message[320] = "";
    machine m = {.memory = {.count = 1}};
    fa_problem p;
    fa_cuda_plan plan;
    m.memory.list[0] =
        (ref_buffer){.name = "arrays", .data = (char *)&uneven, .bytes = sizeof uneven};
    attend_uneven(&(ref_inputs){.q = call.q, .k = call.k, .v = call.v, .options = options},
                  &gradients.dout, exact);
    device = devices[H200];
    const fa_status status =
        make_plan(&call, &gradients, &options, &p, &plan, message, sizeof message);
    CHECK(status == FA_OK && run_in_workspace(&m, &p, &plan, message, sizeof message) == FA_OK,
          "%s", message);
}

static void test_uneven_rows(int dim, uneven_case of, fa_precision precision)
{
    const double allowed = allow_row_error(of, precision);
    ref_gradients exact;
    make_uneven(dim, of);
    corrected_weights = precision != FA_PRECISION_TF32;
    run_uneven(dim, of, precision, &exact);
    corrected_weights = false;
    const double least = of >= TINY_QUERIES ? FLT_MIN : 0; /* gradients may be below all floats */
    const double errors[] = {find_row_error(uneven.dq, exact.dq.value, UNEVEN_Q, dim, least),
                             find_row_error(uneven.dk, exact.dk.value, UNEVEN_K, dim, least),
                             find_row_error(uneven.dv, exact.dv.value, UNEVEN_K, dim, least)};
    ref_gradients_free(&exact);
    for (int i = 0; i < 3; i++)
        CHECK(errors[i] < allowed, "d %d, case %d, precision %d: a row of %s is off by %g", dim,
              (int)of, (int)precision, (const char *[]){"dq", "dk", "dv"}[i], errors[i]);
}

/* Whether the kernel supports the problem. */
static bool run_twice(int64_t number, kind of, bool wide)
{
    machine m = {.number = number, .kind = of, .wide = wide};
    const bool done = run_problem(&m);
    free(m.first);
    return done;
}

static void run_each(const int64_t *list, size_t bytes, kind of)
{
    for (size_t i = 0; i < bytes / sizeof *list; i++) run_twice(list[i], of, false);
}

/* The problems that are listed here. */
static void run_listed(void)
{
    run_each(numbers, sizeof numbers, ANY);
    run_each(tf32, sizeof tf32, TF32);
    run_each(float32, sizeof float32, FLOAT32);
    run_each(tf32_in_place, sizeof tf32_in_place, TF32_IN_PLACE);
    run_each(float32_in_place, sizeof float32_in_place, FLOAT32_IN_PLACE);
    for (int64_t i = 0; i < 5 * wide_numbers; i++) run_twice(i / 5, wide_kinds[i % 5], true);
    run_each(peaked, sizeof peaked, PEAKED);
    run_each(corrected, sizeof corrected, CORRECTED);
    run_each(peaked, sizeof peaked, CORRECTED_PEAKED);
}

int main(int argc, char **argv)
{
    const int64_t first = argc > 1 ? atoll(argv[1]) : 0;
    const int64_t end = first + (argc > 2 ? atoll(argv[2]) : 0);
    int done = 0;
    test_begin();
    const bool searching = sample_begin(argc > 1);
    const kind asked = argc > 3 ? (kind)atoi(argv[3]) : ANY;
    const bool wide = argc > 4;
    for (int64_t number = first; number < end; number++) done += run_twice(number, asked, wide);
    if (searching) run_listed();
    sample_found();
    if (argc == 1) run_listed();
    corrected_weights = false;
    for (int way = 0; way < 3; way++) {
        in_place = way > 0;
        hand_dtype = in_place ? FA_FLOAT32 : FA_FLOAT16;
        hand_precision = way == 1 ? FA_PRECISION_TF32 : FA_PRECISION_FLOAT32;
        test_low_scores();
        test_infinite_key();
        if (hand_dtype == FA_FLOAT32) test_infinite_scores();
        test_rows_behind();
    }
    in_place = false;
    test_corrected_weights();
    test_many_tiles(false);
    test_many_tiles(true);
    static const int dims[] = {64, 128, 256, 384, 512};
    for (int i = 0; i < 5 * ROW_OPTIONS; i++)
        if (sample_has(i % ROW_OPTIONS, i / ROW_OPTIONS))
            test_row_sums(dims[i / ROW_OPTIONS], (row_option)(i % ROW_OPTIONS));
    static const int uneven_dims[] = {64, 100, 200, 264, 512};
    for (int i = 0; i < UNEVEN_CASES * 10; i++)
        if (sample_has(i % UNEVEN_CASES, 5 + i / UNEVEN_CASES))
            test_uneven_rows(uneven_dims[i / UNEVEN_CASES % 5], (uneven_case)(i % UNEVEN_CASES),
                             i / UNEVEN_CASES < 5 ? FA_PRECISION_FLOAT32 : FA_PRECISION_TF32);
    if (argc == 1) sample_end(kernels, runs);
    /* The allowance has room for errors that all have the same sign. Truncating operands instead of
     * rounding them gives 0.27 of it; omitting one of three products gives more than all of it. */
    const double rounded = fmax(worst[TF32], worst[TF32_IN_PLACE]),
                 exact = fmax(worst[FLOAT32], fmax(worst[FLOAT32_IN_PLACE], worst[CORRECTED]));
    CHECK(rounded < 0.2 || argc > 1, "tf32: %.3f of what is allowed", rounded);
    CHECK(exact < 0.1 || argc > 1, "tf32x3: %.3f of what is allowed", exact);
    CHECK(blind_queries || argc > 1, "all queries saw keys");
    CHECK(rounded_otherwise || argc > 1, "no sum of dq depended on the order");
    CHECK((shared_queries[0] && shared_queries[1]) || argc > 1,
          "%d and %d problems of shared queries", shared_queries[0], shared_queries[1]);
    if (argc > 2) {
        printf("%5d problems, %d with another rounding of dq, %d with one order of its sums, %lld "
               "queries that saw nothing; %.3f of what is allowed\n",
               done, rounded_otherwise, ordered, (long long)blind_queries, worst[asked]);
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    }
    return test_end();
}
