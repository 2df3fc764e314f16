/*
 * The kernel of fa_append, run on the host (cuda_on_cpu.h): random calls against their definition, and wild lengths,
 * indices and pages, which must lead nowhere outside of the cache.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "append_case.h"
#include "check.h"
#include "cuda/plan_append.h"
#include "cuda_on_cpu.h"
#include "gpus.h"
#include "normalize.h"

enum { CASES = 400, WILD = 400 };

void append_simt(fa_append_params p);
static void run_append(const void *p) { append_simt(*(const fa_append_params *)p); }

/* The launch of a call. */
static fa_status plan_launch(const fa_append_call *call, fa_append_params *params,
                             fa_cuda_plan_launch *l)
{
    fa_append_problem p;
    fa_cuda_plan plan;
    char why[320] = "";
    const fa_status status = fa_append_problem_make(call, &p);
    if (status != FA_OK) return status;
    CHECK(fa_cuda_plan_append(&p, &devices[T4], &plan, why, sizeof why), "%s", why);
    *l = plan.launches[0];
    fa_cuda_set_append_params(&p, l, params);
    return FA_OK;
}

static fa_status run(append_case *c, uint64_t number)
{
    fa_append_params params;
    fa_cuda_plan_launch planned;
    const fa_cuda_plan_launch *l = &planned;
    const fa_append_call call = {FA_DEVICE_CUDA,         &c->k_new,
                                 append_case_v_new(c),   &c->k_cache,
                                 append_case_v_cache(c), &c->o};
    const fa_status status = plan_launch(&call, &params, &planned);
    if (status != FA_OK || l->idle) return status;
    char name[40];
    snprintf(name, sizeof name, "case %d", (int)number);
    const cuda_run launch = {.name = name,
                             .kernel = run_append,
                             .parameters = &params,
                             .grid = number % 3 == 0 && l->grid > 2 ? 2 : l->grid,
                             .threads = l->threads,
                             .smem_bytes = l->smem_bytes,
                             .backwards = number % 2,
                             .memory = &c->buffers};
    cuda_run_kernel(&launch);
    return FA_OK;
}

/* Several warps write the row of a sequence in the table of rows. */
static void test_long_table(void)
{
    enum { BATCH = 3, PAGE = 5, ENTRIES = 150, ROOM = PAGE * ENTRIES };
    static float cache[BATCH * ENTRIES * PAGE];
    static int32_t lengths[BATCH] = {ROOM, 0, 423}, padding[BATCH] = {7, 0, 300};
    static int32_t pages[BATCH * ENTRIES], rows[BATCH * ROOM];
    fa_append_params params;
    fa_cuda_plan_launch l;
    const fa_tensor none = fa_bshd(NULL, FA_FLOAT32, BATCH, 0, 1, 1);
    const fa_tensor k = fa_bshd(cache, FA_FLOAT32, BATCH * ENTRIES, PAGE, 1, 1);
    const fa_append_options o = {.size = sizeof o,
                                 .flags = FA_LENGTHS_WITH_PADDING,
                                 .lengths = lengths,
                                 .left_padding = padding,
                                 .block_table = pages,
                                 .block_table_stride = ENTRIES,
                                 .row_table_after = rows};
    const fa_append_call call = {FA_DEVICE_CUDA, &none, NULL, &k, NULL, &o};
    for (int i = 0; i < BATCH * ENTRIES; i++) pages[i] = BATCH * ENTRIES - 1 - i;
    for (int i = 0; i < BATCH * ROOM; i++) rows[i] = -1;
    CHECK(plan_launch(&call, &params, &l) == FA_OK, "%s", fa_last_error());
    CHECK(l.grid == 3, "%u blocks, not 3 of 4 warps for 3 rows of 750 entries", (unsigned)l.grid);
    const cuda_run launch = {.name = "long table",
                             .kernel = run_append,
                             .parameters = &params,
                             .grid = l.grid,
                             .threads = l.threads,
                             .smem_bytes = l.smem_bytes};
    cuda_run_kernel(&launch);
    for (int b = 0; b < BATCH; b++)
        for (int j = 0; j < ROOM; j++) {
            const int row = padding[b] + j;
            const int want =
                row < lengths[b] ? pages[b * ENTRIES + row / PAGE] * PAGE + row % PAGE : -1;
            CHECK(rows[b * ROOM + j] == want, "key %d of sequence %d is in row %d, not %d", j, b,
                  (int)rows[b * ROOM + j], want);
        }
}

/* However large the table is, there are at most FA_APPEND_TABLE_WARPS warps, or one for each sequence. */
static void test_blocks_of_a_table(void)
{
    static const int64_t batches[] = {1, 64, 20000}, blocks[] = {128, 4096, 5000};
    static int32_t array[2];
    for (int i = 0; i < 3; i++) {
        fa_append_params params;
        fa_cuda_plan_launch l;
        const fa_tensor none = fa_bshd(NULL, FA_FLOAT32, batches[i], 0, 1, 1);
        const fa_tensor k = fa_bshd(array, FA_FLOAT32, 1, 16, 1, 1);
        const fa_append_options o = {.size = sizeof o,
                                     .block_table = array + 1,
                                     .block_table_stride = (128 << 10) / 16,
                                     .row_table_after = (int32_t *)0x10000000};
        const fa_append_call call = {FA_DEVICE_CUDA, &none, NULL, &k, NULL, &o};
        CHECK(plan_launch(&call, &params, &l) == FA_OK && l.grid == blocks[i],
              "%d sequences: %u blocks (%s)", (int)batches[i], (unsigned)l.grid, fa_last_error());
    }
}

int main(void)
{
    test_begin();
    test_long_table();
    test_blocks_of_a_table();
    for (uint64_t n = 0; n < CASES + WILD; n++) {
        append_case c;
        ref_report report = REF_REPORT_INIT;
        append_case_make(&c, n % CASES);
        if (n >= CASES) append_case_spoil(&c);
        CHECK(run(&c, n) == FA_OK, "case %d: %s (%s)", (int)n, fa_last_error(), c.text);
        if (n < CASES) append_case_check(&c, &report);
        else append_case_check_inside(&c, &report);
        CHECK(report.ok, "case %d: %s (%s)", (int)n, report.message, c.text);
        append_case_free(&c);
    }
    return test_end();
}
