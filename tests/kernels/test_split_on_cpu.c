/*
 * forward_sm90_split and forward_sm90_merge, run on the host (cuda_on_cpu.h, hopper_units.h): random
 * problems from the whole option space, compared with float64. The launches are those that the
 * planner makes, but parts have one to a few key tiles. Problems whose keys are not split are left
 * out.
 *
 * Each call runs twice, with different orders of the threads, delays and numbers of blocks. The
 * bits must be the same.
 *
 * Arguments: the first problem's number, and how many; then all of them run, and the runs of each
 * variant are printed.
 */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention_on_cpu.h"
#include "caller_memory.h"
#include "check.h"
#include "cuda/family.h"
#include "cuda/plan_split_sm90.h"
#include "forward_on_cpu.h"
#include "hopper_units.h"

#define WILD_QUERIES 140 /* two query tiles */
#include "wild_pages.h"

enum { PROBLEMS = 1500, LENGTH_PROBLEMS = 400, PEAKED_PROBLEMS = 52, EACH = 8, EACH_OF_SAMPLE = 3 };

/* An additional option of problems (sample_takes) beside kinds of peaked rows: packed queries over pages. */
static const uint64_t packed_over_pages_bit = UINT64_C(1) << (RANDOM_NUM_PEAKS + 4);

/* Others: of two or three parts. */
static uint64_t find_parts_bit(const fa_cuda_plan *plan)
{
    const fa_sm90_split *split = &plan->launches[0].sm90.split;
    if (split->sections || split->parts > 3) return 0;
    return UINT64_C(1) << (RANDOM_NUM_PEAKS + 3 + split->parts);
}

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
#include "test_split_on_cpu_forms.h"
#undef FORM

static void (*const kernels[FA_VARIANTS])(const void *parameters) = {
#define FORM(name) [FA_VARIANT_##name] = run_##name,
#include "test_split_on_cpu_forms.h"
};

static int runs[FA_VARIANTS], max_runs = INT_MAX;
/* Calls with so many parts at most, from 2 on; with causal masks, windows, sinks and lse; and with lengths on the device,
 * of queries and keys that are packed or not. */
static int with_parts[FA_SM90_SECTION_PARTS + 1], causal, windows, sinks, lse;
static int packed_queries, packed_keys, queries_by_length, keys_by_length, pages, packed_over_pages;
/* Calls whose query tiles have rows of so many heads, with sections or whole query tiles; with sections, those of which the host
 * knows all lengths; and those with whole query tiles. */
static int groups[FA_SM90_BOX_ROWS + 1], uniform, whole;
/* Calls with whole query tiles and lengths on the device. */
static int taken;
/* Peaked problems with whole query tiles, and two in which three and four sections share query tiles: found by a scan. */
static const int64_t peaked[] = {16, 52, 449, 467};

/* Query tiles that sections share, by the number of their parts. */
static int cuts[FA_SM90_SECTION_PARTS + 1];

/* How a call is run. */
typedef struct machine {
    int64_t number;
    bool otherwise; /* in other orders, with other delays and another number of blocks */
    ref_buffers memory;
} machine;

/* Launch number i of the plan. */
static void launch(const machine *m, const fa_problem *p, const fa_cuda_plan *plan, int i)
{
    char name[200];
    parameters both;
    fa_cuda_fault fault;
    const fa_cuda_plan_launch *l = &plan->launches[i];
    memset(&both, POISON, sizeof both);
    fa_cuda_set_params(p, l, &both.attention);
    both.more.split = fa_cuda_split_of(p, l);
    if (i == 0)
        CHECK(fa_cuda_split_sm90_params(p, l, hopper_encode_map, &both.more, &fault), "no map");
    /* Few counters, so that a launch that does not reset one affects the next problems. */
    if (i == 0 && l->sm90.dynamic && m->number / 4 % 4)
        both.more.counter = (int32_t)(m->number % 3);
    cuda_run run = {.name = name,
                    .kernel = kernels[l->variant],
                    .memory = &m->memory,
                    .parameters = &both,
                    .units = &hopper_units,
                    .overlaps = l->overlaps,
                    .grid = l->grid,
                    .threads = l->threads,
                    .smem_bytes = l->smem_bytes};
    if (i == 0 && m->otherwise) run.grid = (unsigned)both.more.tasks; /* a block for each */
    vary_run(&run, m->number, m->otherwise, 2);
    snprintf(name, sizeof name,
             "number %lld: %s, %d parts of %d tiles, %u blocks, %s, %s copies, %s products, lanes "
             "%x of warp %u slow",
             (long long)m->number, fa_variants[l->variant].name, (int)l->sm90.split.parts,
             (int)l->sm90.split.part_tiles, run.grid, run.backwards ? "backwards" : "forwards",
             run.late_copies ? "late" : "early", run.late_products ? "late" : "early",
             run.slow_lanes, run.slow_warp);
    cuda_run_kernel(&run);
}

/* False if memory outside the workspace was written. */
static bool run_plan(machine *m, fa_problem *p, const fa_cuda_plan *plan)
{
    begin_workspace(&m->memory, p, plan->workspace_bytes);
    for (int i = 0; i < plan->count; i++) launch(m, p, plan, i);
    const fa_sm90_split split = fa_cuda_split_of(p, &plan->launches[0]);
    for (int i = 0; i < split.sections; i++) {
        CHECK(split.cuts[i].parts == 0 ||
                  (split.cuts[i].parts > 1 && split.cuts[i].parts <= FA_SM90_SECTION_PARTS),
              "section %d: %d parts", i, (int)split.cuts[i].parts);
        cuts[split.cuts[i].parts]++;
    }
    return end_workspace(&m->memory, p);
}

/* Makes the plan for few multiprocessors, so that blocks have several tasks. Parts have one to four
 * key tiles, or as many as the planner chooses. If lengths are on the device, there are one to 128
 * sections, of one or two key tiles at least, or query tiles are whole. False: the family does not
 * take the problem. */
static bool plan_call(int64_t number, const fa_problem *p, fa_cuda_plan *plan, char *why,
                      size_t size)
{
    fa_cuda_device device = devices[H200];
    device.multiprocessors = (int)(number % 3) + 1;
    fa_cuda_plan_begin(&device, &fa_cuda_forward_split_sm90, plan);
    if (!fa_cuda_forward_split_sm90.plan(p, &device, plan, why, size)) return false;
    const fa_sm90_split *split = &plan->launches[0].sm90.split;
    const bool own_lengths = fa_cuda_has_own_lengths(p);
    if (own_lengths || (split->parts == 0 && number % 2)) {
        const bool whole_tiles = own_lengths && (number % 8 == 2 || number % 8 == 5);
        fa_cuda_plan_begin(&device, &fa_cuda_forward_split_sm90, plan);
        if (!fa_cuda_plan_split_form(p, whole_tiles ? FA_CUDA_WHOLE_TILES : FA_CUDA_SECTIONS,
                                     &device, plan, why, size))
            return false;
    }
    if (split->parts == 0) return true;
    if (split->sections) {
        fa_cuda_section_split_sm90(p, &device, (1 + number * 7 % 64) * (1 + number / 2 % 2), plan);
        for (int i = 0; i < 2; i++) plan->launches[i].sm90.split.least = 1 + (int)(number / 3 % 2);
        return true;
    }
    const int64_t part_tiles = number / 3 % 5, tiles = split->part_tiles * split->parts;
    if (part_tiles > 0 && tiles <= part_tiles * FA_SM90_PARTS)
        fa_cuda_cut_split_sm90(p, &device, part_tiles, plan);
    return true;
}

static bool wants(void *context, const random_call *call)
{
    const int64_t number = *(const int64_t *)context;
    char message[320];
    fa_problem p;
    fa_cuda_plan plan;
    /* attend gives the reason. */
    if (make_forward(call, &p, message, sizeof message) != FA_OK) return true;
    return plan_call(number, &p, &plan, NULL, 0) && runs[plan.launches[0].variant] < max_runs &&
           sample_takes(&p, &plan,
                        other_options | find_parts_bit(&plan) |
                            (p.cu_seqlens_q && p.block_table ? packed_over_pages_bit : 0));
}

static void count(const fa_problem *p, const fa_cuda_plan *plan)
{
    for (int i = 0; i < plan->count; i++) runs[plan->launches[i].variant]++;
    with_parts[plan->launches[0].sm90.split.parts]++;
    const bool is_whole = plan->launches[0].sm90.split.parts == 0;
    whole += is_whole && !plan->launches[0].sm90.dynamic;
    taken += is_whole && plan->launches[0].sm90.dynamic;
    groups[plan->launches[0].sm90.split.group.heads]++;
    uniform += plan->launches[0].sm90.split.sections && !fa_cuda_has_own_lengths(p);
    causal += p->causal;
    windows += p->window_left >= 0;
    sinks += p->sinks != NULL;
    lse += p->lse != NULL;
    packed_queries += p->cu_seqlens_q != NULL;
    packed_keys += p->cu_seqlens_k != NULL;
    queries_by_length += p->seqlens_q != NULL;
    keys_by_length += p->seqlens_k != NULL;
    pages += p->block_table != NULL;
    packed_over_pages += p->block_table && p->cu_seqlens_q;
}

static fa_status attend(void *context, const random_call *call, char *message, size_t size)
{
    fa_problem p;
    fa_cuda_plan plan;
    machine m = {.number = *(const int64_t *)context, .memory = *call->buffers};
    const fa_status status = make_forward(call, &p, message, size);
    if (status != FA_OK) return status;
    if (!plan_call(m.number, &p, &plan, message, size)) return FA_ERROR_UNSUPPORTED;
    count(&p, &plan);
    char *const before = ref_buffers_copy(call->buffers);
    bool clean = run_plan(&m, &p, &plan);
    char *const first = ref_buffers_copy(call->buffers);
    ref_buffers_put(call->buffers, before);
    m.otherwise = true;
    clean &= run_plan(&m, &p, &plan);
    const bool same = ref_buffers_are(call->buffers, first);
    free(before), free(first);
    return random_status_of_runs(clean, same, message, size);
}

/* Whether query i of a head has its outputs by the reference, or only NaN. */
static void check_outputs(const attention *a, const ref_array *want, int64_t h, int64_t i,
                          bool is_nan)
{
    for (int64_t c = 0; c < a->s.d_v; c++) {
        const double x = ref_load(&a->out, 0, i, h, c),
                     y = want->value[ref_array_index(want, 0, i, h, c)];
        CHECK(is_nan ? isnan(x) : fabs(x - y) < 0.02,
              "head %lld, query %lld, column %lld: %g, expected %g", (long long)h, (long long)i,
              (long long)c, x, y);
    }
}

/* The same, and its log-sum-exp. */
static void check_row(const attention *a, const ref_array *want, const ref_array *lse, int64_t h,
                      int64_t i, bool is_nan)
{
    const float own = a->lse[h * a->s.n_q + i];
    const double exact = lse->value[h * a->s.n_q + i];
    CHECK(is_nan ? isnan(own) : fabs(own - exact) < 1e-3,
          "head %lld, query %lld: lse %g, expected %g", (long long)h, (long long)i, own, exact);
    check_outputs(a, want, h, i, is_nan);
}

/* A NaN in the queries of the first head or in one of its keys: the rows that see it are NaN, in whatever part they see
 * it, and no others. With one block, the sums of the second head follow those in the registers, also in parts of which a
 * consumer sees nothing. */
static void test_nan(int64_t seen_from)
{
    attention a;
    ref_array want, lse;
    const int64_t number = 3; /* one multiprocessor, parts of one key tile */
    const shape s = {1, 2, 2, 300, 700, 64, 64};
    make_aligned(&a, 5, s, FA_BFLOAT16);
    a.in.options.flags = FA_CAUSAL;
    const int64_t key = seen_from + s.n_k - s.n_q;
    ref_forward(&a.in, &want, &lse);
    ref_store(&a.in.k, 0, key, 0, 7, NAN);
    const random_call call = forward_call(&a);
    check_attends(attend, number, &call);
    for (int64_t h = 0; h < 2; h++)
        for (int64_t i = 0; i < s.n_q; i++)
            check_row(&a, &want, &lse, h, i, h == 0 && i >= seen_from);
    ref_array_free(&want);
    ref_array_free(&lse);
    attention_free(&a);
}

/* A sequence of more query tiles than a warp has lanes, whose length of keys is on the device. */
static void test_many_tiles(int64_t number)
{
    static const int32_t keys[] = {1100};
    attention a;
    ref_array want, lse;
    const shape s = {1, 1, 1, 4500, 1200, 16, 16};
    make_aligned(&a, 5, s, FA_BFLOAT16);
    a.in.options.flags = FA_CAUSAL;
    a.in.options.seqlens_k = keys;
    ref_forward(&a.in, &want, &lse);
    const random_call call = forward_call(&a);
    check_attends(attend, number, &call);
    for (int64_t i = s.n_q - keys[0]; i < s.n_q; i++) check_row(&a, &want, &lse, 0, i, false);
    ref_array_free(&want);
    ref_array_free(&lse);
    attention_free(&a);
}

/* Windows and diagonals that are larger than all positions, with a length of keys on the device. */
static void test_far_windows(void)
{
    enum { FAR = FA_SM90_UNBOUNDED };
    static const int64_t rows[][3] = {/* diagonal, left, right */
                                      {0, FAR - 1, FAR - 24},
                                      {INT64_C(2) * FAR, INT64_C(2) * FAR - 10, -1},
                                      {5 - FAR, -1, FAR - 1}};
    static const int32_t keys[] = {700};
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
        attention a;
        ref_array want, lse;
        const shape s = {1, 1, 1, 300, 800, 64, 64};
        make_aligned(&a, 5, s, FA_BFLOAT16);
        a.in.options.flags = FA_WINDOW | FA_DIAGONAL;
        a.in.options.diagonal = rows[n][0];
        a.in.options.window_left = rows[n][1];
        a.in.options.window_right = rows[n][2];
        a.in.options.seqlens_k = keys;
        ref_forward(&a.in, &want, &lse);
        const random_call call = forward_call(&a);
        check_attends(attend, 5, &call);
        for (int64_t i = 0; i < s.n_q; i += 50) check_row(&a, &want, &lse, 0, i, false);
        ref_array_free(&want);
        ref_array_free(&lse);
        attention_free(&a);
    }
}

/* Groups of any number of heads, by sections and by whole query tiles: all rows of the first batch item. */
static void test_groups(void)
{
    static const int64_t sizes[] = {3, 5, 6, 7, 12, 33};
    for (int64_t n = 0; n < 12; n++) {
        attention a;
        ref_array want, lse;
        const int64_t group = sizes[n / 2], queries = 1 + (40 + 97 * n) / group;
        const shape s = {2, 2 * group, 2, queries, 300, 64, 64};
        static int32_t keys[2] = {260, 300};
        make_aligned(&a, (uint64_t)n, s, n % 2 ? FA_FLOAT16 : FA_BFLOAT16);
        a.in.options.flags = n % 3 ? FA_CAUSAL : 0;
        if (n % 2) a.in.options.seqlens_k = keys;
        ref_forward(&a.in, &want, &lse);
        const random_call call = forward_call(&a);
        check_attends(attend, n, &call);
        for (int64_t h = 0; h < s.heads_q; h++)
            for (int64_t i = 0; i < s.n_q; i++) check_row(&a, &want, &lse, h, i, false);
        ref_array_free(&want);
        ref_array_free(&lse);
        attention_free(&a);
    }
}

/* A softcap at each head dim that has a variant, in parts, sections and whole query tiles that heads share, with lengths on the
 * device or without: a small one, without a series; and a large one, by a series. Some sums
 * of parts have sinks added. */
static void test_softcaps(void)
{
    static const int64_t dims[] = {64, 128, 192, 256};
    static const float sinks[] = {0.5f, -1, 2, 1};
    const int sections = with_parts[FA_SM90_SECTION_PARTS], tiles = whole + taken,
              parts = with_parts[2] + with_parts[3];
    for (int64_t n = 0; n < 32; n++) {
        attention a;
        ref_array want, lse;
        const int64_t d = dims[(n + n / 4) % 4];
        const shape s = {1, 4, 2, n % 4 < 2 ? 140 : 70, 400, d, d};
        static int32_t keys[1] = {370};
        make_aligned(&a, (uint64_t)n, s, n / 3 % 2 ? FA_FLOAT16 : FA_BFLOAT16);
        a.in.options.flags = FA_CAUSAL;
        if (n % 5 == 0) {
            a.in.options.flags |= FA_WINDOW;
            a.in.options.window_left = 250;
            a.in.options.window_right = -1;
        }
        a.in.options.softcap = n % 4 == 1 ? 1.5f : 25.0f;
        if (n / 8 % 2) a.in.options.seqlens_k = keys;
        if (n % 7 == 2) a.in.options.sinks = sinks;
        ref_forward(&a.in, &want, &lse);
        random_call call = forward_call(&a);
        const bool with_lse = n / 16 > 0;
        if (!with_lse) call.lse = NULL;
        check_attends(attend, n, &call);
        for (int64_t h = 0; h < s.heads_q; h++)
            for (int64_t i = 0; i < s.n_q; i++)
                if (with_lse) check_row(&a, &want, &lse, h, i, false);
                else check_outputs(&a, &want, h, i, false);
        ref_array_free(&want);
        ref_array_free(&lse);
        attention_free(&a);
    }
    CHECK(with_parts[FA_SM90_SECTION_PARTS] > sections && whole + taken > tiles &&
              with_parts[2] + with_parts[3] > parts,
          "a form did not run with a softcap");
}

/* More packed sequences than three warps have lanes, most of them empty or of one query: whole query tiles, by a counter and
 * without one, and sections. */
static void test_many_sequences(int64_t number)
{
    enum { COUNT = 100 };
    static int32_t cu_q[COUNT + 1], cu_k[COUNT + 1];
    attention a;
    ref_array want, lse;
    for (int i = 0; i < COUNT; i++) {
        cu_q[i + 1] = cu_q[i] + (i % 40 == 7 ? 90 : i % 3 == 1);
        cu_k[i + 1] = cu_k[i] + (i % 40 == 7 ? 90 + i : i % 5 * 3);
    }
    const shape s = {1, 6, 2, cu_q[COUNT] + 3, cu_k[COUNT] + 9, 64, 64};
    make_aligned(&a, 5, s, FA_BFLOAT16);
    a.in.options.flags = FA_CAUSAL;
    a.in.options.cu_seqlens_q = cu_q;
    a.in.options.cu_seqlens_k = cu_k;
    a.in.options.num_sequences = COUNT;
    a.in.options.max_seqlen_q = 90;
    a.in.options.max_seqlen_k = 180;
    ref_forward(&a.in, &want, &lse);
    const random_call call = forward_call(&a);
    check_attends(attend, number, &call);
    for (int64_t h = 0; h < s.heads_q; h++)
        for (int64_t i = 0; i < s.n_q; i++)
            if (isfinite(lse.value[h * s.n_q + i])) check_row(&a, &want, &lse, h, i, false);
    ref_array_free(&want);
    ref_array_free(&lse);
    attention_free(&a);
}

/* A cache in pages of so many rows, in random order. Rows of no sequence are NaN, and so are pages that are not used; table entries
 * behind a sequence's last page are no pages. */
static fa_tensor make_cache(attention *a, const char *name, int64_t page, const int32_t *table,
                            int64_t entries, const int32_t *lengths)
{
    ref_layout layout = REF_LAYOUT_CONTIGUOUS;
    const int64_t pages = a->s.batch * entries + 1, columns = *name == 'k' ? a->s.d : a->s.d_v;
    fa_tensor t = {.dtype = a->in.q.dtype, .shape = {pages, page, a->s.heads_kv, columns}};
    layout.aligned_data = true;
    ref_buffers_tensor(&a->buffers, name, &t, &layout);
    for (int64_t n = 0; n < pages * page * a->s.heads_kv * columns; n++)
        ref_store(&t, 0, 0, 0, n, NAN);
    for (int64_t b = 0; b < a->s.batch; b++)
        for (int64_t j = 0; j < lengths[b]; j++)
            for (int64_t h = 0; h < a->s.heads_kv; h++)
                for (int64_t c = 0; c < columns; c++)
                    ref_store(&t, table[b * entries + j / page], j % page, h, c,
                              ref_random_normal(&a->random));
    return t;
}

/* Pages of few rows, and of no power of two: the kernels whose warps copy keys and values, and others; the latter half with a
 * softcap, a small and a large one. */
static void test_small_pages(void)
{
    static const int64_t pages[] = {1, 3, 16, 24, 5}, dims[] = {64, 128, 256, 40, 120};
    static const int32_t lengths[] = {70, 333, 1, 129};
    enum { BATCH = 4, KEYS = 333 };
    for (int64_t run = 0; run < 40; run++) {
        static int32_t table[BATCH * KEYS];
        attention a;
        ref_array want, lse;
        const int64_t n = run % 20, page = pages[n % 5],
                      d = dims[n / 5 == 3 ? n % 4 : (n + n / 5) % 5],
                      entries = (KEYS + page - 1) / page;
        const shape s = {BATCH, 4, n % 2 ? 4 : 2, 90 + n, 1, d, d};
        make_aligned(&a, (uint64_t)n, s, n % 3 ? FA_BFLOAT16 : FA_FLOAT16);
        for (int b = 0; b < BATCH; b++)
            for (int i = 0; i < entries; i++)
                table[b * entries + i] = i * page < lengths[b]
                                             ? (int32_t)((b * entries + i) * 11 % (BATCH * entries))
                                             : INT32_MIN;
        a.in.k = make_cache(&a, "k", page, table, entries, lengths);
        a.in.v = make_cache(&a, "v", page, table, entries, lengths);
        a.in.options.flags = n % 4 ? FA_CAUSAL : 0;
        if (run >= 20) a.in.options.softcap = n % 6 == 2 ? 2.0f : 30.0f;
        if (n % 4 == 3) {
            a.in.options.flags |= FA_WINDOW;
            a.in.options.window_left = 40;
            a.in.options.window_right = 0;
        }
        a.in.options.seqlens_k = lengths;
        a.in.options.block_table = table;
        a.in.options.block_table_stride = entries;
        ref_forward(&a.in, &want, &lse);
        random_call call = forward_call(&a);
        if (run >= 20 && n % 2) call.lse = NULL; /* then there is a series */
        check_attends(attend, n, &call);
        for (int64_t b = 0; b < BATCH; b++)
            for (int64_t h = 0; h < s.heads_q; h++)
                for (int64_t i = 0; i < s.n_q; i++)
                    for (int64_t c = 0; c < d; c++) {
                        const double x = ref_load(&a.out, b, i, h, c),
                                     y = want.value[ref_array_index(&want, b, i, h, c)];
                        CHECK(
                            fabs(x - y) < 0.02,
                            "pages of %lld, dim %lld, sequence %lld, head %lld, query %lld, column "
                            "%lld: %g, expected %g",
                            (long long)page, (long long)d, (long long)b, (long long)h, (long long)i,
                            (long long)c, x, y);
                    }
        ref_array_free(&want);
        ref_array_free(&lse);
        attention_free(&a);
    }
}

/* Packed sequences whose cumulative lengths are wrong: all reads and writes stay inside. Their work is longer than the line
 * can be, or keys end before all tensors. */
static void test_wild_lengths(bool too_long)
{
    enum { COUNT = 11 };
    static int32_t cu_q[COUNT + 1], cu_k[COUNT + 1];
    attention a;
    char message[320] = "";
    fa_problem p;
    fa_cuda_plan plan;
    const shape s = {1, 2, 2, 700, 300, 64, 64};
    for (int i = 0; i <= COUNT; i++) {
        cu_q[i] = too_long ? i % 2 * 700 : 60 * i;
        cu_k[i] = too_long ? 25 * i : i % 2 ? INT32_MIN : 100;
    }
    make_aligned(&a, 5, s, FA_BFLOAT16);
    a.in.options.flags = FA_CAUSAL;
    a.in.options.cu_seqlens_q = cu_q;
    a.in.options.cu_seqlens_k = cu_k;
    a.in.options.num_sequences = COUNT;
    a.in.options.max_seqlen_q = a.in.options.max_seqlen_k = 700;
    const random_call call = forward_call(&a);
    machine m = {.number = 5, .memory = *call.buffers};
    CHECK(make_forward(&call, &p, message, sizeof message) == FA_OK &&
              plan_call(m.number, &p, &plan, message, sizeof message),
          "%s", message);
    for (int i = 0; i < 2 && too_long; i++) plan.launches[i].sm90.split.tile_cost = 75 << 21;
    CHECK(run_plan(&m, &p, &plan), "memory beside the workspace was written");
    attention_free(&a);
}

/* Problems [*number, end) with lengths on the device and pages. Returns the number of problems for this family. */
static int run_length_problems(random_settings settings, int64_t *number, int64_t end)
{
    static random_result result;
    int done = 0;
    for (; *number < end; ++*number) {
        settings.focus = *number % 2 ? RANDOM_PAGED : RANDOM_LENGTHS;
        random_problem_run((uint64_t)*number, &settings, &result);
        if (result.status == FA_ERROR_UNSUPPORTED) continue;
        done++;
        CHECK(result.report.ok, "lengths, number %lld: %s\n  %s", (long long)*number,
              result.report.message, result.description);
    }
    return done;
}

static int run_problems(random_settings settings, int64_t *number, int64_t begin, int64_t wanted)
{
    const bool listed = wanted == 0;
    *number = begin;
    if (listed) max_runs = sample.whole ? EACH : EACH_OF_SAMPLE;
    int done = run_forward_problems(&settings, number, begin + (listed ? PROBLEMS : wanted));
    *number = begin;
    if (listed) max_runs *= 2;
    done += run_length_problems(settings, number, begin + (listed ? LENGTH_PROBLEMS : wanted));
    max_runs = INT_MAX;
    *number = begin;
    return done +
           run_peaked_problems(&settings, number, begin + (listed ? PEAKED_PROBLEMS : wanted));
}

int main(int argc, char **argv)
{
    const int64_t begin = argc > 1 ? atoll(argv[1]) : 0, wanted = argc > 2 ? atoll(argv[2]) : 0;
    int64_t number = begin;
    const random_settings settings = {.device = FA_DEVICE_CUDA,
                                      .tiles = true,
                                      .one_pass = true,
                                      .plain_scores = true,
                                      .attend = attend,
                                      .wants = wants,
                                      .context = &number};
    test_begin();
    if (sample_begin(argc > 1)) run_problems(settings, &number, begin, wanted);
    sample_found();
    int done = run_problems(settings, &number, begin, wanted);
    random_settings all = settings;
    all.wants = NULL;
    for (size_t i = 0; i < sizeof peaked / sizeof peaked[0] && argc == 1; i++) {
        number = peaked[i];
        done += run_peaked_problems(&all, &number, peaked[i] + 1);
    }
    static const int64_t seen_from[] = {-400, -1, 0, 77, 128, 299};
    for (size_t i = 0; i < sizeof seen_from / sizeof seen_from[0]; i++) test_nan(seen_from[i]);
    test_many_tiles(5);
    test_far_windows();
    test_groups();
    test_softcaps();
    test_small_pages();
    for (int64_t n = 2; n < 8; n++) test_many_sequences(n); /* 2 and 5: whole query tiles */
    for (int i = 0; i < 2; i++) test_wild_lengths(i);
    for (int64_t i = 0; i < 4; i++) /* any number of parts; 2, 4, and 6 of them */
        test_wild_pages(attend, &(int64_t){6 * i}, i % 2 ? FA_FLOAT16 : FA_BFLOAT16, false);
    if (argc == 1) sample_end(kernels, runs);
    CHECK(argc > 1 || (causal && windows && sinks && lse),
          "%d causal, %d windows, %d sinks, %d lse", causal, windows, sinks, lse);
    CHECK(
        argc > 1 || (packed_queries && packed_keys && queries_by_length && keys_by_length &&
                     pages && packed_over_pages),
        "%d packed queries, %d packed keys, %d and %d by length, %d pages, %d with packed queries",
        packed_queries, packed_keys, queries_by_length, keys_by_length, pages, packed_over_pages);
    CHECK(
        argc > 1 || (groups[1] && groups[2] && groups[3] && groups[4] && groups[5] && groups[8] &&
                     uniform && whole && taken),
        "query tiles of 1, 2, 3, 4, 5 and 8 heads: %d, %d, %d, %d, %d and %d; %d lengths that the "
        "host knows; %d with whole query tiles, %d with lengths on the device",
        groups[1], groups[2], groups[3], groups[4], groups[5], groups[8], uniform, whole, taken);
    CHECK(argc > 1 || (cuts[2] && cuts[3] + cuts[4] > 0),
          "sections shared %d, %d and %d query tiles", cuts[2], cuts[3], cuts[4]);
    int more_parts = 0;
    for (int i = 3; i <= FA_SM90_PARTS; i++) more_parts += with_parts[i];
    CHECK(argc > 1 || (with_parts[2] && more_parts), "%d problems had two parts, %d more",
          with_parts[2], more_parts);
    if (argc > 2) {
        printf("%5d problems: %d causal, %d windows, %d sinks, %d lse\n", done, causal, windows,
               sinks, lse);
        printf("%5d packed queries, %d packed keys, %d and %d by length, %d pages, %d with packed "
               "queries\n",
               packed_queries, packed_keys, queries_by_length, keys_by_length, pages,
               packed_over_pages);
        for (int i = 0; i < 8; i++)
            if (groups[i]) printf("%5d with query tiles of %d heads\n", groups[i], 1 << i);
        printf("%5d with sections and lengths that the host knows\n", uniform);
        printf("%5d with whole query tiles, %d with lengths on the device\n", whole, taken);
        for (int i = 2; i <= FA_SM90_SECTION_PARTS; i++)
            if (cuts[i]) printf("%5d query tiles in parts of %d sections\n", cuts[i], i);
        for (int i = 2; i <= FA_SM90_SECTION_PARTS; i++)
            printf("%5d with %d parts\n", with_parts[i], i);
        for (int i = 0; i < FA_VARIANTS; i++)
            if (kernels[i]) printf("%5d %s\n", runs[i], fa_variants[i].name);
    }
    return test_end();
}
