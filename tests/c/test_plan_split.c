/*
 * Split keys of the forward pass on Hopper, without a GPU: the numbering of tasks that kernels and planner share, and
 * which problems are split.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda/family.h"
#include "cuda/plan_split_sm90.h"
#include "gpus.h"
#include "normalize.h"
#include "split_problem.h"

static const fa_cuda_family *const split_family = &fa_cuda_forward_split_sm90;

static fa_problem make_problem(int64_t heads, int64_t n_q, int64_t n_k, int64_t d)
{
    return make_split_problem(1, heads, heads, n_q, n_k, d);
}

static bool plan_by(const fa_cuda_family *family, const fa_problem *p, fa_cuda_plan *plan)
{
    return fa_cuda_plan_make(p, &devices[H200], family, plan, NULL, 0);
}

/* A random number below n. */
static uint64_t draw(uint64_t *state, uint64_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % n;
}

static int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

/* The key tiles that a query tile sees, from the mask's definition. Like the kernel, from a multiple of 32 keys on. */
static int64_t seen_tiles(const fa_problem *p, const fa_sm90_split *split, int64_t tile,
                          int64_t keys)
{
    const int64_t first = tile * split->queries, end = first + split->queries;
    const int64_t last = (end < p->rows_q ? end : p->rows_q) - 1;
    const int64_t diagonal = p->diagonal_given ? p->diagonal : p->n_k - p->rows_q;
    const int64_t right = p->causal ? 0 : p->window_right, far = INT64_C(1) << 40;
    const int64_t center = diagonal < -far ? -far : diagonal > far ? far : diagonal;
    int64_t lo = 0, hi = p->n_k;
    if (right >= 0) hi = clamp(last + center + right + 1, p->n_k);
    if (p->window_left >= 0) lo = clamp(first + center - p->window_left, p->n_k);
    lo = lo / FA_SM90_KEY_ALIGNMENT * FA_SM90_KEY_ALIGNMENT;
    return lo < hi ? (hi - lo + keys - 1) / keys : 0;
}

/* Every part of every query tile of every head is one task, and the parts have all keys that the queries see. */
static void check_split(const fa_problem *p, const fa_cuda_plan_launch *l)
{
    const fa_sm90_split *split = &l->sm90.split;
    const int32_t tasks = split->first_task[split->parts];
    int64_t expected = 0;
    CHECK(split->parts >= 1 && split->parts <= FA_SM90_PARTS, "%d parts", (int)split->parts);
    CHECK(split->heads == p->heads_q * p->batch &&
              split->tiles * (int64_t)split->queries >= p->rows_q,
          "%d tiles", (int)split->tiles);
    for (int32_t tile = 0; tile < split->tiles; tile++) {
        const int32_t parts = fa_sm90_count_parts(split, tile);
        const int64_t seen = seen_tiles(p, split, tile, l->tile_k);
        CHECK((int64_t)parts * split->part_tiles >= seen,
              "tile %d has %d parts of %d for %lld key tiles", (int)tile, (int)parts,
              (int)split->part_tiles, (long long)seen);
        expected += (int64_t)parts * split->heads;
    }
    CHECK(expected == tasks, "%lld tasks, expected %d", (long long)expected, (int)tasks);
    for (int32_t task = 0; task < tasks; task++) {
        const fa_sm90_part part = fa_sm90_find_part(split, task);
        CHECK(part.tile >= 0 && part.tile < split->tiles && part.head >= 0 &&
                  part.head < split->heads && part.number < fa_sm90_count_parts(split, part.tile) &&
                  fa_sm90_task_of(split, part.number, part.tile, part.head) == task,
              "task %d is part %d of tile %d of head %d", (int)task, (int)part.number,
              (int)part.tile, (int)part.head);
    }
}

/* With all masks by position, for parts of all lengths. */
static void test_numbering(void)
{
    static const int64_t sizes[][3] = {/* heads, n_q, n_k */
                                       {1, 1000, 1000},
                                       {3, 400, 2000},
                                       {2, 1500, 700},
                                       {5, 129, 1029},
                                       {1, 64, 3000}};
    static const int64_t masks[][3] = {/* causal, left, right */
                                       {0, -1, -1},  {1, -1, -1},     {0, -1, 200},
                                       {0, 300, -1}, {1, 300, -1},    {0, 97, 33},
                                       {1, 0, -1},   {0, 1000, 1000}, {1, 600, 5}};
    static const int64_t diagonals[] = {INT64_MIN, -5000, -300, 0, 1, 131, 700, 5000, INT64_MAX};
    for (int i = 0; i < 5 * 9 * 10; i++) {
        const int64_t *size = sizes[i % 5], *mask = masks[i / 5 % 9];
        fa_cuda_plan plan;
        fa_problem p = make_problem(size[0], size[1], size[2],
                                    i % 3 == 0   ? 64
                                    : i % 3 == 1 ? 128
                                                 : 256);
        p.causal = mask[0] == 1;
        p.window_left = mask[1];
        p.window_right = mask[2];
        p.diagonal_given = i / 45 > 0;
        if (p.diagonal_given) p.diagonal = diagonals[i / 45 - 1];
        fa_cuda_plan_begin(&devices[H200], split_family, &plan);
        if (!fa_cuda_plan_split_form(&p, FA_CUDA_PARTS, &devices[H200], &plan, NULL, 0)) continue;
        check_split(&p, &plan.launches[0]);
        for (int64_t part_tiles = 1; part_tiles < 20; part_tiles++) {
            if (p.n_k > part_tiles * FA_SM90_PARTS * plan.launches[0].tile_k) continue;
            fa_cuda_cut_split_sm90(&p, &devices[H200], part_tiles, &plan);
            check_split(&p, &plan.launches[0]);
        }
    }
}

/* Both launches, their workspace and their overlap. */
static void check_launches(const fa_problem *p, const fa_cuda_plan *plan)
{
    const fa_cuda_plan_launch *l = &plan->launches[0], *merge = &plan->launches[1];
    const fa_sm90_split *split = &l->sm90.split;
    const int64_t rows = (int64_t)split->first_task[split->parts] * split->queries;
    const size_t bytes = (size_t)rows * ((size_t)split->value_dim * 4 + 8);
    CHECK(plan->count == 2 && plan->workspace_bytes == bytes && bytes <= 256 << 20,
          "%d launches, %zu bytes", plan->count, plan->workspace_bytes);
    CHECK(l->overlaps && merge->overlaps && !l->idle && !merge->idle, "overlap");
    CHECK(strcmp(fa_variants[merge->variant].kernel, "forward_sm90_merge") == 0, "%s",
          fa_variants[merge->variant].name);
    CHECK((int64_t)merge->grid * merge->threads * 8 >= p->rows_q * p->heads_q * p->batch * p->d_v,
          "%u blocks", merge->grid);
}

/* Few work tiles are split, unless a call's properties forbid it. */
static void test_choice(void)
{
    static const struct {
        int64_t heads, n_q, n_k, d;
        bool causal, split;
    } cases[] = {{1, 12000, 12000, 128, false, true},    {2, 1728, 1728, 256, false, true},
                 {1, 12000, 12000, 128, true, true},     {32, 4096, 4096, 128, false, false},
                 {32, 4096, 4096, 128, true, false},     {132, 128, 8192, 128, false, false},
                 {1, 400, 400, 128, false, false},       {8, 128, 65536, 128, false, true},
                 {1, 150, 100000, 64, false, true},      {1, 100, 4096, 320, false, false},
                 {100000, 100, 2048, 128, false, false}, {1, 1 << 20, 1 << 20, 128, true, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_problem p = make_problem(cases[i].heads, cases[i].n_q, cases[i].n_k, cases[i].d);
        fa_problem masked = p;
        fa_cuda_plan plan;
        masked.causal = cases[i].causal;
        CHECK(plan_by(NULL, &masked, &plan), "no plan");
        CHECK((plan.family == split_family) == cases[i].split, "case %d: %s", (int)i,
              plan.family->name);
        /* Few tiles of very many keys have more sections than parts. */
        const bool sections = cases[i].split && plan.launches[0].sm90.split.sections > 0;
        CHECK(sections == (cases[i].n_k == 100000), "case %d: sections", (int)i);
        if (cases[i].split && !sections) check_launches(&masked, &plan);
    }
}

/* Without lengths on the device there are as many sections as leave query tiles the same number of them. */
static void test_section_counts(void)
{
    static const struct {
        int64_t batch, heads, heads_kv, n_q, n_k, d, tiles;
        int sections;
    } cases[] = {{2, 16, 2, 54, 27865, 128, 16, 128}, {10, 8, 2, 31, 3367, 256, 20, 120},
                 {2, 4, 1, 134, 38347, 128, 10, 130}, {4, 20, 4, 34, 12556, 128, 32, 128},
                 {1, 4, 2, 42, 36064, 128, 2, 88},    {4, 12, 4, 93, 6032, 256, 48, 132},
                 {30, 6, 2, 25, 2355, 64, 60, 120}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_problem p = make_split_problem(cases[i].batch, cases[i].heads, cases[i].heads_kv,
                                                cases[i].n_q, cases[i].n_k, cases[i].d);
        fa_cuda_plan plan;
        fa_cuda_plan_begin(&devices[H200], split_family, &plan);
        CHECK(fa_cuda_plan_split_form(&p, FA_CUDA_SECTIONS, &devices[H200], &plan, NULL, 0),
              "case %d: no plan", (int)i);
        const fa_sm90_split *split = &plan.launches[0].sm90.split;
        CHECK(split->sections == cases[i].sections, "case %d: %d sections", (int)i,
              (int)split->sections);
        CHECK(split->slices * split->in_step == split->sections &&
                  (split->sections == 132 || split->sections % cases[i].tiles == 0),
              "case %d: %d sections of a line", (int)i, (int)split->slices);
    }
}

/* A server's call: packed queries over pages, with lengths on the device. Two heads share one of the cache. */
static fa_problem make_chunk(int64_t heads, int64_t batch, int64_t rows, int64_t n_k, int64_t d)
{
    static const int32_t numbers[1];
    enum { PAGE = 64 };
    fa_problem p = make_problem(heads, rows, n_k, d);
    p.batch = batch;
    p.heads_kv = heads / 2;
    p.blocks_k = batch * n_k / PAGE;
    p.rows_k = PAGE;
    set_view(&p.k, PAGE, heads / 2, d);
    set_view(&p.v, PAGE, heads / 2, d);
    p.cu_seqlens_q = p.seqlens_k = p.block_table = numbers;
    p.block_table_stride = n_k / PAGE;
    p.causal = true;
    return p;
}

/* The line's length by its definition. */
static int32_t count_length(const fa_sm90_line *line, int32_t queries, int32_t cost, int32_t tiles)
{
    int32_t length = 0;
    for (int32_t t = 0; t < tiles; t++)
        length += cost + (int32_t)clamp(line->reach + (t + 1) * (int64_t)queries, line->keys);
    return length;
}

static fa_sm90_line draw_line(uint64_t *state)
{
    fa_sm90_line line = {.tiles = (int32_t)draw(state, 40),
                         .reach = (int32_t)draw(state, 9000) - 3000,
                         .keys = (int32_t)draw(state, 6000)};
    const uint64_t kind = draw(state, 8);
    if (kind == 0) line.reach = FA_SM90_UNBOUNDED;
    if (kind == 1) line.reach = -FA_SM90_UNBOUNDED;
    if (kind == 2) line.keys = 0;
    return line;
}

/* The parts of a query tile with so many keys, `begin` behind the line's begin: sections have all key tiles in order, and no
 * part is short. */
static void check_parts(const fa_sm90_split *split, int32_t begin, int32_t keys, int32_t section,
                        int32_t tile_keys)
{
    const int32_t tiles = keys > 0 ? (keys + tile_keys - 1) / tile_keys : 1,
                  end = begin + keys + split->tile_cost;
    int32_t parts = 0, done = 0, wanted = 0;
    for (int32_t n = begin / section; n * section < end; n++) {
        const int32_t last = (n + 1) * section < end ? (n + 1) * section : end;
        const int32_t from = fa_sm90_cut_at(split, n * section - begin, keys, tile_keys),
                      to = fa_sm90_cut_at(split, last - begin, keys, tile_keys);
        CHECK(from == done && to >= from, "%d keys: part from %d to %d behind %d", (int)keys,
              (int)from, (int)to, (int)done);
        CHECK(to == from || to - from == tiles || 2 * (to - from) >= split->least,
              "a part has %d of %d key tiles", (int)(to - from), (int)tiles);
        if (from > 0 && to > from) {
            const fa_sm90_cuts cuts =
                fa_sm90_count_cuts(split, n * section - begin, keys, section, tile_keys);
            CHECK(cuts.before == parts - 1, "%d cuts before part %d", (int)cuts.before, (int)parts);
            CHECK(wanted == 0 || wanted == cuts.before + cuts.behind + 2, "%d and %d parts",
                  (int)wanted, (int)(cuts.before + cuts.behind + 2));
            wanted = cuts.before + cuts.behind + 2;
        }
        parts += to > from;
        done = to;
    }
    CHECK(done == tiles && parts >= 1 && parts <= FA_SM90_SECTION_PARTS,
          "%d of %d key tiles, %d parts", (int)done, (int)tiles, (int)parts);
    CHECK(wanted == 0 || wanted == parts, "%d parts, expected %d", (int)wanted, (int)parts);
}

/* Sections of random lines. */
static void test_sections(void)
{
    static const int32_t tile_keys[] = {80, 96, 128};
    uint64_t state = 1;
    for (int i = 0; i < 2000; i++) {
        const fa_sm90_group group = fa_sm90_group_of((int32_t)draw(&state, 8) + 1, 2);
        const int32_t q = group.tile_queries, k = tile_keys[draw(&state, 3)],
                      slices = (int32_t)draw(&state, 60) + 1;
        const fa_sm90_split split = {.queries = q,
                                     .slices = slices,
                                     .by_slices = fa_reciprocal_of(slices),
                                     .tile_cost = (int32_t)draw(&state, 300) + 1,
                                     .least = (int32_t)draw(&state, 5) + 1};
        fa_sm90_line lines[4];
        int32_t length = 0, most = 0;
        for (int n = 0; n < 4; n++) {
            lines[n] = draw_line(&state);
            for (int32_t t = 0; t <= lines[n].tiles; t++) {
                const int32_t own = fa_sm90_length_of_tiles(&lines[n], &group, split.tile_cost, t),
                              want = count_length(&lines[n], q, split.tile_cost, t);
                CHECK(own == want, "%d tiles: %d, expected %d", (int)t, (int)own, (int)want);
            }
            length += count_length(&lines[n], q, split.tile_cost, lines[n].tiles);
            if (lines[n].keys > most) most = lines[n].keys;
        }
        const int32_t section = fa_sm90_section_length(&split, length, most, k);
        CHECK((int64_t)section * split.slices >= length && section >= split.least * k,
              "sections of %d of %d", (int)section, (int)length);
        int32_t begin = 0;
        for (int n = 0; n < 4; n++)
            for (int32_t t = 0; t < lines[n].tiles; t++) {
                const int32_t keys = fa_sm90_keys_of_tile(&lines[n], q, t);
                check_parts(&split, begin, keys, section, k);
                begin += keys + split.tile_cost;
            }
    }
}

/* A section for each multiprocessor, with room for two parts, and a note. */
static void check_lengths(const fa_problem *p, const fa_cuda_plan *plan)
{
    const fa_cuda_plan_launch *l = &plan->launches[0], *merge = &plan->launches[1];
    const fa_sm90_split *split = &l->sm90.split;
    const int64_t sections = split->sections;
    const int blocks = devices[H200].multiprocessors;
    const int64_t heads = p->heads_q / split->group.heads, in_step = split->in_step;
    CHECK(in_step * split->line_heads == heads && sections == in_step * split->slices &&
              sections == blocks / in_step * in_step && 100 * sections >= 96 * blocks,
          "%d sections of %d heads in step", (int)sections, (int)in_step);
    CHECK(split->tile_cost > 0 && split->least > 1, "cost %d", (int)split->tile_cost);
    const size_t slots = 2 * (size_t)sections * (size_t)split->queries,
                 bytes = slots * ((size_t)split->value_dim * 4 + 8) +
                         (size_t)sections * sizeof(fa_sm90_cut);
    CHECK(plan->count == 2 && l->workspace_bytes == bytes && merge->workspace_bytes == bytes &&
              plan->workspace_bytes >= bytes,
          "%zu bytes", l->workspace_bytes);
    CHECK(l->grid == (uint32_t)(sections < blocks ? sections : blocks) && l->overlaps &&
              merge->overlaps && !merge->idle,
          "%u blocks", l->grid);
    CHECK(merge->grid == 8 * sections, "%u blocks merge", merge->grid);
    CHECK(strstr(fa_variants[merge->variant].name, "forward_sm90_merge_lengths"), "%s",
          fa_variants[merge->variant].name);
}

/* Whole query tiles that two heads share, which blocks take from a counter. */
static void check_taken(const fa_problem *p, const fa_cuda_plan *plan)
{
    const fa_cuda_plan_launch *l = &plan->launches[0];
    const int64_t groups = p->heads_q / l->sm90.split.group.heads,
                  items = p->cu_seqlens_q ? 1 : p->batch;
    fa_sm90_params order;
    memset(&order, 0, sizeof order);
    CHECK(plan->count == 1 && l->workspace_bytes == 0 && l->overlaps, "%d launches", plan->count);
    CHECK(l->sm90.split.parts == 0 && l->sm90.split.sections == 0 && l->sm90.dynamic, "%d parts",
          (int)l->sm90.split.parts);
    CHECK(l->tasks == l->tiles * groups * items && l->grid == (l->tasks < 132 ? l->tasks : 132),
          "%u blocks for %d tasks", l->grid, (int)l->tasks);
}

/* With lengths on the device, keys are split where work tiles are few or long. */
static void test_lengths(void)
{
    static const struct {
        int64_t heads, batch, rows, n_k, d;
        int form; /* below 0: another family */
    } cases[] = {{8, 1, 512, 16384, 128, FA_CUDA_SECTIONS},
                 {32, 1, 512, 16384, 128, -1}, /* one round of equally long work tiles */
                 {8, 1, 512, 512, 128, -1},
                 {4, 2, 1024, 32768, 64, FA_CUDA_SECTIONS},
                 {2, 1, 2048, 65536, 256, FA_CUDA_SECTIONS},
                 {16, 1, 512, 16384, 128, FA_CUDA_SECTIONS},
                 {8, 20, 2500, 16384, 128, FA_CUDA_SECTIONS},
                 {8, 40, 5000, 16384, 128, -1}, /* blocks take work tiles late */
                 {16, 2, 2900, 3520, 128, FA_CUDA_WHOLE_TILES},
                 {16, 1, 1881, 1984, 256, FA_CUDA_WHOLE_TILES},
                 {64, 40, 5000, 16384, 128, -1}, /* as many work tiles with one head as with two */
                 {64, 40, 2400, 1024, 256, FA_CUDA_WHOLE_TILES}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_problem p =
            make_chunk(cases[i].heads, cases[i].batch, cases[i].rows, cases[i].n_k, cases[i].d);
        fa_cuda_plan plan;
        fa_problem known = p;
        known.max_q = cases[i].rows / cases[i].batch;
        CHECK(plan_by(NULL, &known, &plan), "no plan");
        CHECK((plan.family == split_family) == (cases[i].form >= 0), "case %d: %s", (int)i,
              plan.family->name);
        if (cases[i].form == FA_CUDA_SECTIONS) check_lengths(&known, &plan);
        if (cases[i].form == FA_CUDA_WHOLE_TILES) check_taken(&known, &plan);
        CHECK(plan_by(split_family, &p, &plan) && plan.family == split_family, "by name");
        if (plan.count == 2) check_lengths(&p, &plan);
        else check_taken(&p, &plan);
    }
}

/* Padded items and pages without lengths are split, too. */
static void test_kinds_of_lengths(void)
{
    fa_cuda_plan plan;
    fa_problem p = make_chunk(8, 1, 512, 16384, 128);
    CHECK(plan_by(NULL, &p, &plan), "no plan");
    CHECK(plan.family == split_family, "%s", plan.family->name);
    p.cu_seqlens_q = NULL;
    CHECK(plan_by(NULL, &p, &plan), "no plan");
    CHECK(plan.family == split_family, "padded: %s", plan.family->name);
    check_lengths(&p, &plan);
    p.seqlens_k = NULL;
    CHECK(plan_by(NULL, &p, &plan), "no plan");
    CHECK(plan.family == split_family, "pages: %s", plan.family->name);
    check_launches(&p, &plan);
    check_split(&p, &plan.launches[0]);
}

/* Batches that may have sequences of few queries have one launch, unless decode_sm90 has many of them. */
static void test_mixed(void)
{
    static const struct {
        int64_t heads, batch, rows, max_q;
        const char *family;
    } cases[] = {
        {4, 7, 518, 512, "sm90_split"},      {8, 3, 1512, 700, "sm90_split"},
        {4, 60, 571, 512, "sm90_split"},     {8, 60, 1571, 512, "sm90_split"},
        {32, 60, 1571, 512, "mixed_beside"}, /* much to read for decode_sm90 */
        {32, 7, 518, 512, "sm90_split"},     {16, 16, 527, 512, "sm90_split"},
        {32, 15, 527, 512, "sm90_split"},    {16, 3, 2816, 2048, "sm90_split"}, /* uneven chunks */
        {32, 3, 2816, 2048, "sm90_split"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_chunk(cases[i].heads, cases[i].batch, cases[i].rows, 16384, 128);
        fa_cuda_plan plan;
        p.max_q = cases[i].max_q;
        char why[320] = "";
        const bool planned = fa_cuda_plan_make(&p, &devices[H200], NULL, &plan, why, sizeof why);
        const char *const name = planned ? plan.family->name : why;
        CHECK(strcmp(name, cases[i].family) == 0, "case %d: %s", (int)i, name);
    }
}

/* decode_sm90 takes a batch of few queries on average, unless it would read the keys of the longest sequence often: it has 8 rows of
 * a work tile here, so 4 queries. */
static void test_reads(void)
{
    static const struct {
        int64_t max_q, d, window;
        bool decode;
    } cases[] = {{32, 128, -1, true},  {33, 128, -1, false}, {96, 64, 1023, false},
                 {32, 64, 1023, true}, {17, 256, -1, false}, {17, 256, 1023, true},
                 {16, 256, -1, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_chunk(16, 42, 41 + cases[i].max_q, 8192, cases[i].d);
        fa_cuda_plan plan;
        p.max_q = cases[i].max_q;
        p.window_left = cases[i].window;
        CHECK(plan_by(NULL, &p, &plan), "no plan");
        CHECK((plan.family == &fa_cuda_decode_sm90) == cases[i].decode, "case %d: %s", (int)i,
              plan.family->name);
    }
}

/* A query without data has room for what runs if they are not aligned: another family than this one, in front of it. */
static void test_unaligned(void)
{
    static _Alignas(16) char memory[64];
    fa_problem p = make_chunk(2, 2, 136, 32768, 64);
    fa_cuda_plan plan;
    p.max_q = 128;
    p.q.data = p.k.data = p.v.data = p.out.data = memory;
    p.lacks_data = true;
    CHECK(plan_by(NULL, &p, &plan), "no plan");
    CHECK(plan.family == split_family, "%s", plan.family->name);
    const size_t room = plan.workspace_bytes;
    p.lacks_data = false;
    p.q.data = memory + 8;
    CHECK(plan_by(NULL, &p, &plan), "no plan");
    CHECK(plan.family != split_family && plan.workspace_bytes <= room, "%s: %zu bytes of %zu",
          plan.family->name, plan.workspace_bytes, room);
}

/* A query without data has room for what runs with data, aligned or not. Returns the most bytes that such a call needs. */
static size_t check_room(const fa_problem *query, int number)
{
    static _Alignas(16) char memory[64];
    fa_problem p = *query;
    fa_cuda_plan plan;
    size_t most = 0;
    p.q.data = p.k.data = p.v.data = p.out.data = memory;
    p.lacks_data = true;
    CHECK(plan_by(NULL, &p, &plan), "case %d: no plan", number);
    const size_t room = plan.workspace_bytes;
    p.lacks_data = false;
    for (int unaligned = 0; unaligned < 8; unaligned++) {
        p.out.data = memory;
        p.q.data = memory + 8 * (unaligned & 1);
        p.k.data = memory + 8 * (unaligned >> 1 & 1);
        p.v.data = memory + 8 * (unaligned >> 2);
        CHECK(plan_by(NULL, &p, &plan), "case %d: no plan", number);
        CHECK(plan.workspace_bytes <= room, "case %d, unaligned %d, %s: %zu bytes of %zu", number,
              unaligned, plan.family->name, plan.workspace_bytes, room);
        if (plan.workspace_bytes > most) most = plan.workspace_bytes;
    }
    return most;
}

/* Families give way to others that refuse data that is not aligned. Then a third family runs, which is in no list of either: a query
 * without data has room for it, too. */
static void test_unaligned_packed(void)
{
    static const struct {
        int64_t batch, rows, max_q, keys, heads, heads_kv, d;
        bool packed_keys, causal;
    } cases[] = {{20, 160, 144, 20000, 32, 8, 128, true, true},
                 {100, 300, 264, 100000, 8, 2, 128, true, true},
                 {64, 512, 400, 38400, 16, 4, 128, true, true},
                 {12, 6324, 4059, 2245, 33, 3, 64, false, false},
                 {6, 36, 29, 1463, 7, 1, 56, false, true},
                 {12, 684, 76, 935, 14, 7, 160, false, true},
                 {128, 256, 130, 839, 2, 1, 24, false, true},
                 {85, 425, 22, 9236, 5, 5, 32, false, true}};
    static int32_t lengths[1];
    size_t most = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p =
            make_chunk(cases[i].heads, cases[i].batch, cases[i].rows, cases[i].keys, cases[i].d);
        p.heads_kv = cases[i].heads_kv;
        p.max_q = cases[i].max_q;
        p.causal = cases[i].causal;
        p.block_table = NULL;
        p.rows_k = cases[i].keys;
        p.blocks_k = cases[i].packed_keys ? 1 : p.batch;
        set_view(&p.k, p.rows_k, p.heads_kv, p.d);
        set_view(&p.v, p.rows_k, p.heads_kv, p.d);
        if (cases[i].packed_keys) p.cu_seqlens_k = lengths, p.seqlens_k = NULL;
        const size_t bytes = check_room(&p, (int)i);
        if (bytes > most) most = bytes;
    }
    CHECK(most > 0, "no case needs a workspace");
}

/* The same for padded queries, and in decode. */
static void test_unaligned_padded(void)
{
    static const struct {
        fa_pass pass;
        int64_t batch, n_q, n_k, heads, heads_kv, d, page, window;
        float softcap;
        bool lengths;
    } cases[] = {{FA_PASS_FORWARD, 100, 1, 2048, 8, 8, 128, 0, -1, 0, true},
                 {FA_PASS_DECODE, 100, 1, 2048, 8, 8, 128, 0, -1, 0, true},
                 {FA_PASS_FORWARD, 3, 64, 4096, 60, 30, 96, 4, -1, 30, false},
                 {FA_PASS_FORWARD, 16, 64, 1000, 2, 1, 80, 24, -1, 30, false},
                 {FA_PASS_FORWARD, 7, 16, 8192, 14, 2, 80, 0, 1024, 0, false}};
    static int32_t lengths[1];
    size_t most = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int64_t page = cases[i].page;
        fa_problem p = make_split_problem(cases[i].batch, cases[i].heads, cases[i].heads_kv,
                                          cases[i].n_q, cases[i].n_k, cases[i].d);
        p.pass = cases[i].pass;
        p.causal = true;
        p.window_left = cases[i].window;
        p.softcap = cases[i].softcap;
        if (cases[i].lengths) p.seqlens_k = lengths;
        if (page) {
            p.block_table = lengths;
            p.block_table_stride = (p.n_k + page - 1) / page;
            p.rows_k = page;
            p.blocks_k = p.batch * p.block_table_stride;
            set_view(&p.k, page, p.heads_kv, p.d);
            set_view(&p.v, page, p.heads_kv, p.d);
        }
        const size_t bytes = check_room(&p, (int)i);
        if (bytes > most) most = bytes;
    }
    CHECK(most > 0, "no case needs a workspace");
}

/* The same from the caller's tensors on: what they lack is noticed, and only where there are elements. */
static void test_room_of_a_call(void)
{
    static const struct {
        fa_pass pass;
        int64_t n_q, n_k, heads, d;
    } cases[] = {{FA_PASS_DECODE, 16, 16384, 14, 192},
                 {FA_PASS_FORWARD, 16, 16384, 14, 192},
                 {FA_PASS_FORWARD, 16, 0, 14, 192}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p;
        fa_tensor t[4]; /* q, k, v, out */
        const fa_options o = {.size = sizeof o};
        fa_arguments a = {.pass = cases[i].pass,
                          .device = FA_DEVICE_CUDA,
                          .dry_run = true,
                          .q = &t[0],
                          .k = &t[1],
                          .v = &t[2],
                          .out = &t[3],
                          .options = &o};
        for (int j = 0; j < 4; j++)
            t[j] = fa_bshd(NULL, FA_BFLOAT16, 2, j == 1 || j == 2 ? cases[i].n_k : cases[i].n_q,
                           cases[i].heads, cases[i].d);
        /* Addresses that are not followed, far from each other. Without one of q, k and v. */
        for (int missing = 0; missing < 4; missing++) {
            for (uintptr_t j = 0; j < 4; j++) t[j].data = (void *)((j + 1) << 40);
            t[missing].data = NULL;
            const bool lacks = missing == 0 || (missing < 3 && cases[i].n_k > 0);
            CHECK(fa_problem_make(&a, &p) == FA_OK && p.lacks_data == lacks, "case %d, %d: %d, %s",
                  (int)i, missing, p.lacks_data, fa_last_error());
        }
        for (int j = 0; j < 4; j++) t[j].data = NULL;
        CHECK(fa_problem_make(&a, &p) == FA_OK, "case %d: %s", (int)i, fa_last_error());
        fa_cuda_plan plan;
        CHECK(plan_by(NULL, &p, &plan), "case %d: no plan", (int)i);
        const size_t room = plan.workspace_bytes;
        a.out = NULL; /* the same as a contiguous one */
        CHECK(fa_problem_make(&a, &p) == FA_OK && plan_by(NULL, &p, &plan) &&
                  plan.workspace_bytes == room,
              "case %d without out: %zu bytes, not %zu", (int)i, plan.workspace_bytes, room);
        a.out = &t[3];
        a.dry_run = false;
        for (uintptr_t unaligned = 0; unaligned < 8; unaligned++) {
            for (uintptr_t j = 0; j < 4; j++)
                t[j].data = (void *)(((j + 1) << 40) + 8 * (unaligned >> j & 1));
            CHECK(fa_problem_make(&a, &p) == FA_OK && !p.lacks_data && plan_by(NULL, &p, &plan),
                  "case %d: %s", (int)i, fa_last_error());
            CHECK(plan.workspace_bytes <= room, "case %d, unaligned %d, %s: %zu bytes of %zu",
                  (int)i, (int)unaligned, plan.family->name, plan.workspace_bytes, room);
        }
    }
}

/* Keys and values are copied from pages that TMA cannot load, or loads more slowly. */
static void test_small_pages(void)
{
    static const struct {
        int64_t page, d, rows;
        int copied,
            other; /* the variants of forward_sm90_split with it, or without: FA_NO_VARIANT if it is not chosen */
        float softcap;
    } cases[] = {
        {1, 64, 2000, FA_VARIANT_forward_sm90_split_d64_copied_bf16, FA_NO_VARIANT, 0},
        {3, 104, 2000, FA_VARIANT_forward_sm90_split_d128_copied_overlapped_bf16, FA_NO_VARIANT, 0},
        {16, 128, 2000, FA_VARIANT_forward_sm90_split_d128_copied_overlapped_bf16, FA_NO_VARIANT,
         0},
        {24, 128, 2000, FA_VARIANT_forward_sm90_split_d128_copied_overlapped_bf16, FA_NO_VARIANT,
         0},
        {64, 128, 2000, FA_NO_VARIANT, FA_NO_VARIANT, 0},
        {16, 128, 31, FA_NO_VARIANT, FA_VARIANT_forward_sm90_split_d128_bf16, 0},
        {128, 256, 2000, FA_VARIANT_forward_sm90_split_d256_copied_bf16, FA_NO_VARIANT, 0},
        {128, 256, 31, FA_VARIANT_forward_sm90_split_d256_copied_bf16, FA_NO_VARIANT, 0},
        {16, 192, 2000, FA_NO_VARIANT, FA_NO_VARIANT, 0},
        {16, 96, 2000, FA_NO_VARIANT, FA_NO_VARIANT, 0},
        {1, 192, 2000, FA_VARIANT_forward_sm90_split_d256_copied_bf16, FA_NO_VARIANT, 0},
        {1, 98, 2000, FA_NO_VARIANT, FA_NO_VARIANT, 0}, /* rows are no whole vectors */
        {1, 64, 2000, FA_VARIANT_forward_sm90_split_d64_softcap_copied_bf16, FA_NO_VARIANT, 30},
        {16, 128, 2000, FA_VARIANT_forward_sm90_split_d128_softcap_copied_bf16, FA_NO_VARIANT, 30},
        {16, 128, 31, FA_VARIANT_forward_sm90_split_d128_softcap_copied_bf16, FA_NO_VARIANT, 30},
        {64, 128, 2000, FA_NO_VARIANT, FA_NO_VARIANT, 30},
        {64, 128, 2000, FA_NO_VARIANT, FA_NO_VARIANT, 300}, /* by kernels with all options */
        {16, 256, 2000, FA_VARIANT_forward_sm90_split_d256_softcap_copied_bf16, FA_NO_VARIANT, 50},
        {1, 192, 2000, FA_VARIANT_forward_sm90_split_d256_softcap_copied_bf16, FA_NO_VARIANT, 30},
        {16, 192, 2000, FA_NO_VARIANT, FA_NO_VARIANT, 30},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_cuda_plan plan;
        fa_problem p = make_chunk(8, 4, 4 * cases[i].rows, 9600, cases[i].d);
        p.max_q = cases[i].rows + 1; /* unequal queries */
        p.softcap = cases[i].softcap;
        p.rows_k = cases[i].page;
        p.blocks_k = 4 * 9600 / cases[i].page;
        set_view(&p.k, p.rows_k, p.heads_kv, (p.d + 7) / 8 * 8);
        set_view(&p.v, p.rows_k, p.heads_kv, (p.d + 7) / 8 * 8);
        p.block_table_stride = 9600 / cases[i].page;
        CHECK(plan_by(NULL, &p, &plan), "case %d: no plan", (int)i);
        const int found = plan.launches[0].variant,
                  wanted = cases[i].copied != FA_NO_VARIANT ? cases[i].copied : cases[i].other;
        CHECK(wanted == FA_NO_VARIANT ? !fa_variants[found].copied : found == wanted, "case %d: %s",
              (int)i, fa_variants[found].name);
    }
    /* With an option, or without a workspace, pages of one row have forward_sm90. */
    fa_cuda_plan plan;
    fa_problem p = make_chunk(8, 4, 8000, 9600, 128);
    p.rows_k = 1;
    p.blocks_k = 4 * 9600;
    set_view(&p.k, 1, p.heads_kv, p.d);
    set_view(&p.v, 1, p.heads_kv, p.d);
    CHECK(plan_by(&fa_cuda_forward_sm90, &p, &plan) &&
              plan.launches[0].variant == FA_VARIANT_forward_sm90_general128_copied_bf16 &&
              plan.workspace_bytes == 0,
          "%s", fa_variants[plan.launches[0].variant].name);
    const float slopes[8] = {0};
    p.alibi_slopes = slopes;
    CHECK(plan_by(NULL, &p, &plan) && /* behind one for few queries */
              plan.launches[1].variant == FA_VARIANT_forward_sm90_general128_copied_bf16,
          "%s", fa_variants[plan.launches[1].variant].name);
    /* Rows that are too far apart for offsets of 32 bits. */
    p.alibi_slopes = NULL;
    p.k.stride[0] = INT64_C(1) << 20;
    CHECK(plan_by(NULL, &p, &plan) && !fa_variants[plan.launches[0].variant].copied, "%s",
          fa_variants[plan.launches[0].variant].name);
}

/* Without sequences, packed rows become zeros. No length is read: the dynamic schedule would read one. */
static void test_no_sequences(void)
{
    fa_problem p = make_chunk(8, 2, 300, 1024, 128);
    fa_cuda_plan plan;
    p.batch = 0;
    CHECK(plan_by(&fa_cuda_forward_sm90, &p, &plan), "no plan");
    CHECK(!plan.launches[0].idle && plan.launches[0].tasks > 0 && !plan.launches[0].sm90.dynamic,
          "%s has %lld tasks", plan.family->name, (long long)plan.launches[0].tasks);
    CHECK(plan_by(NULL, &p, &plan) && !plan.launches[0].idle && plan.launches[0].tasks > 0,
          "%s: idle", plan.family->name);
}

/* Many short sequences: heads share whole query tiles, in one launch, where that leaves clearly fewer of them. */
static void test_whole_tiles(void)
{
    static const struct {
        int64_t batch, heads, heads_kv, n, tiles; /* 0: another family */
    } cases[] = {{64, 32, 8, 150, 5}, {128, 16, 2, 70, 5}, {64, 32, 32, 150, 0},
                 {64, 32, 8, 256, 0}, {1, 32, 8, 150, 0},  {64, 12, 4, 150, 4},
                 {32, 32, 8, 300, 10}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_problem(cases[i].heads, cases[i].n, cases[i].n, 128);
        fa_cuda_plan plan;
        char text[400];
        p.batch = p.blocks_q = p.blocks_k = cases[i].batch;
        p.heads_kv = cases[i].heads_kv;
        set_view(&p.k, p.n_k, p.heads_kv, 128);
        set_view(&p.v, p.n_k, p.heads_kv, 128);
        CHECK(plan_by(NULL, &p, &plan), "no plan");
        const fa_cuda_plan_launch *l = &plan.launches[0];
        CHECK((plan.family == split_family) == (cases[i].tiles > 0), "case %d: %s", (int)i,
              plan.family->name);
        if (cases[i].tiles == 0) continue;
        const int64_t tasks = cases[i].tiles * cases[i].batch * cases[i].heads_kv;
        CHECK(plan.count == 1 && plan.workspace_bytes == 0 && l->sm90.split.parts == 0 &&
                  l->sm90.split.group.heads == p.heads_q / p.heads_kv,
              "case %d", (int)i);
        CHECK(l->tiles == cases[i].tiles && l->tasks == tasks && l->grid == 132, "%d tasks",
              (int)l->tasks);
        fa_cuda_plan_describe(&p, &devices[H200], &plan, text, sizeof text);
        CHECK(strstr(text, "forward_sm90_split_d128_overlapped_bf16: ") &&
                  strstr(text, "at most 1 part"),
              "%s", text);
    }
}

/* Pairs of query tiles, or tasks that alternate, make work under a causal mask equal. Whole tiles that heads share must be faster than
 * those. */
static void test_whole_tiles_and_pairs(void)
{
    static const struct {
        int64_t batch, heads, heads_kv, n, d, window;
        bool split;
    } cases[] = {{1, 32, 8, 793, 192, -1, false},
                 {20, 2, 1, 411, 256, -1, false},
                 {3, 16, 8, 2965, 64, 153, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = make_problem(cases[i].heads, cases[i].n, cases[i].n, cases[i].d);
        fa_cuda_plan plan;
        p.batch = p.blocks_q = p.blocks_k = cases[i].batch;
        p.heads_kv = cases[i].heads_kv;
        p.causal = true;
        p.window_left = cases[i].window;
        set_view(&p.k, p.n_k, p.heads_kv, cases[i].d);
        set_view(&p.v, p.n_k, p.heads_kv, cases[i].d);
        CHECK(plan_by(NULL, &p, &plan), "no plan");
        CHECK((plan.family == split_family) == cases[i].split, "case %d: %s", (int)i,
              plan.family->name);
    }
}

static void test_refusals(void)
{
    static const float numbers[] = {1};
    const fa_problem p = make_problem(1, 12000, 12000, 128);
    fa_problem other[7];
    fa_cuda_plan plan;
    for (int i = 0; i < 7; i++) other[i] = p;
    other[0].batch_invariant = true;
    other[1].softcap = 30, other[1].alibi_slopes = numbers;
    other[2].alibi_slopes = numbers;
    other[3].scale = -1;
    other[4].attention_chunk = 100;
    other[5] = make_chunk(8, 1, 512, 16384, 128);
    other[5].batch_invariant = true;
    other[6] = make_chunk(16, 1, 512, 1 << 24, 128); /* the line would be too long */
    for (int i = 0; i < 7; i++) {
        CHECK(plan_by(NULL, &other[i], &plan) && plan.family != split_family, "%d", i);
        CHECK(plan_by(split_family, &other[i], &plan) && plan.family != split_family, "%d by name",
              i);
        CHECK(!strstr(plan.passed_over, "split"), "%s", plan.passed_over);
    }
    fa_problem full = make_chunk(16, 3, 2816, 16384, 128), packed = full;
    packed.cu_seqlens_k = packed.seqlens_k;
    packed.block_table = packed.seqlens_k = NULL;
    packed.rows_k = 3 * 16384;
    full.max_q = packed.max_q = 2048;
    full.causal = false;
    full.heads_q = packed.heads_q = 64; /* many work tiles */
    CHECK(plan_by(NULL, &full, &plan) && plan.count == 1, "full: %s", plan.family->name);
    CHECK(plan_by(NULL, &packed, &plan) && plan.count == 1, "packed keys");
    CHECK(fa_cuda_plan_make(&p, &devices[A100], NULL, &plan, NULL, 0) &&
              plan.family != split_family,
          "A100");
    CHECK(plan_by(&fa_cuda_forward_sm90, &p, &plan) && plan.count == 1, "sm90 by name");
}

/* A softcap alone has variants, for parts of chunks, for sections, and for whole query tiles. */
static void test_softcap(void)
{
    static const int64_t dims[] = {64, 80, 128, 192, 256};
    static const int widths[] = {64, 128, 128, 192, 256};
    for (int i = 0; i < 10; i++) {
        fa_problem p = i < 5 ? make_problem(1, 8192, 8192, dims[i])
                             : make_chunk(8, 1, 512, 16384, dims[i - 5]);
        fa_cuda_plan plan;
        p.softcap = 30;
        const bool made = plan_by(NULL, &p, &plan);
        CHECK(made && plan.family == split_family, "%d", i);
        if (!made) continue;
        const fa_variant *v = &fa_variants[plan.launches[0].variant];
        CHECK(v->options == FA_SM90_SOFTCAP && v->head_dim == widths[i % 5], "%d: %s", i, v->name);
    }
}

/* Query tiles cost more keys where sections have few of them. The line counts the larger cost when it might be too long. */
static void test_tile_cost(void)
{
    fa_problem few = make_chunk(8, 3, 300, 8192, 128), many = make_chunk(8, 40, 60000, 8192, 128);
    fa_cuda_plan plan;
    few.max_q = 200, many.max_q = 3000;
    CHECK(fa_cuda_plan_split_form(&few, FA_CUDA_SECTIONS, &devices[H200],
                                  (fa_cuda_plan_begin(&devices[H200], split_family, &plan), &plan),
                                  NULL, 0),
          "few");
    const int32_t large = plan.launches[0].sm90.split.tile_cost;
    CHECK(fa_cuda_plan_split_form(&many, FA_CUDA_SECTIONS, &devices[H200],
                                  (fa_cuda_plan_begin(&devices[H200], split_family, &plan), &plan),
                                  NULL, 0),
          "many");
    const int32_t small = plan.launches[0].sm90.split.tile_cost;
    CHECK(2 * small < large && large < 512, "%d and %d keys", (int)small, (int)large);
}

/* By its name the family takes problems that it would not be faster for. */
static void test_by_name(void)
{
    char text[400];
    fa_cuda_plan plan;
    const fa_problem p = make_problem(16, 1000, 500, 96);
    CHECK(plan_by(NULL, &p, &plan) && plan.family != split_family, "split");
    CHECK(plan_by(fa_cuda_find_family("sm90_split"), &p, &plan) && plan.family == split_family,
          "by name");
    check_launches(&p, &plan);
    fa_cuda_plan_describe(&p, &devices[H200], &plan, text, sizeof text);
    CHECK(strstr(text, "forward_sm90_split_d96_bf16 (query tile 128, key tile 128") &&
              strstr(text, "forward_sm90_merge_bf16 (") && strstr(text, "keys in at most "),
          "%s", text);
}

/* A query for the workspace knows no data. Few queries have no room for split keys, which decode_sm90 takes. */
static void test_workspace(void)
{
    fa_cuda_plan plan, asked;
    fa_problem p = make_problem(1, 12000, 12000, 128);
    CHECK(plan_by(NULL, &p, &asked), "no plan");
    p.q.data = p.k.data = p.v.data = p.out.data = (char *)0x100000;
    CHECK(plan_by(NULL, &p, &plan) && plan.workspace_bytes <= asked.workspace_bytes, "%zu bytes",
          plan.workspace_bytes);
    p = make_problem(1, 8, 12000, 128);
    CHECK(plan_by(NULL, &p, &asked), "no plan");
    p.q.data = p.k.data = p.v.data = p.out.data = (char *)0x100000;
    CHECK(plan_by(NULL, &p, &plan) && plan.workspace_bytes == asked.workspace_bytes,
          "%zu and %zu bytes", plan.workspace_bytes, asked.workspace_bytes);
}

int main(void)
{
    test_begin();
    test_numbering();
    test_section_counts();
    test_sections();
    test_choice();
    test_lengths();
    test_kinds_of_lengths();
    test_mixed();
    test_reads();
    test_unaligned();
    test_unaligned_packed();
    test_unaligned_padded();
    test_room_of_a_call();
    test_no_sequences();
    test_small_pages();
    test_whole_tiles();
    test_whole_tiles_and_pairs();
    test_refusals();
    test_softcap();
    test_tile_cost();
    test_by_name();
    test_workspace();
    return test_end();
}
