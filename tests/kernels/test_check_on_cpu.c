/*
 * The kernel of FA_CHECK compared with the checks of the CPU: random lengths, page tables and rows,
 * with one wrong entry or none. Both must find the same error, and report it with the same message.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda/checks.h"
#include "cuda_on_cpu.h"
#include "flashattn.h"
#include "normalize.h"
#include "random.h"
#include "sample.h"

enum {
    PROBLEMS = 3000,
    SAMPLE = 600,
    BATCH = 300,
    ROWS = 700,
    PAGE = 5,
    TABLE = 7,
    PAGES = 40,
    WANTED = 300
};

void check_simt(fa_check_params p);
static void run_check_simt(const void *p) { check_simt(*(const fa_check_params *)p); }

typedef struct arrays {
    int32_t cu[2][BATCH + 1], lengths[2][BATCH], table[BATCH * TABLE];
    int64_t rows[WANTED];
} arrays;

static arrays given;
static ref_random source;
static float nothing[64];

static int64_t draw(int64_t low, int64_t high) { return ref_random_between(&source, low, high); }
static bool toss(int64_t n) { return ref_random_once_in(&source, n); }

typedef struct problem {
    fa_tensor q, k, weights;
    fa_options o;
    bool rows_given;
    int64_t num_rows;
} problem;

/* No element is ever read: tensors that are only checked have strides of 0, and the result is
 * empty. */
static fa_tensor tensor(int64_t batch, int64_t rows)
{
    return (fa_tensor){nothing, FA_FLOAT32, {batch, rows, 1, 8}, {0, 0, 0, 1}};
}

static void make_side(fa_options *o, int side, int64_t batch, int64_t rows, bool packed)
{
    int32_t *cu = given.cu[side], *lengths = given.lengths[side];
    bool has_lengths = toss(2);
    if (packed) {
        cu[0] = (int32_t)draw(0, 2);
        for (int64_t b = 0; b < batch; b++) {
            const int64_t left = rows - cu[b], most = left < 4 ? left : 4;
            cu[b + 1] = cu[b] + (int32_t)draw(0, most);
        }
        *(side ? &o->cu_seqlens_k : &o->cu_seqlens_q) = cu;
        o->num_sequences = batch;
    }
    int64_t longest = packed ? 4 : rows;
    for (int64_t b = 0; b < batch; b++)
        lengths[b] = (int32_t)draw(0, packed ? cu[b + 1] - cu[b] : rows);
    if (has_lengths) *(side ? &o->seqlens_k : &o->seqlens_q) = lengths;
    if (packed && toss(2)) *(side ? &o->max_seqlen_k : &o->max_seqlen_q) = longest;
}

static void make_pages(fa_options *o, int64_t batch)
{
    o->block_table = given.table;
    o->block_table_stride = TABLE;
    o->seqlens_k = given.lengths[1];
    for (int64_t b = 0; b < batch; b++) given.lengths[1][b] = (int32_t)draw(0, PAGE * TABLE);
    for (int i = 0; i < BATCH * TABLE; i++) {
        const int32_t used = (given.lengths[1][i / TABLE % batch] + PAGE - 1) / PAGE;
        given.table[i] = (int32_t)draw(0, PAGES - 1);
        if (i % TABLE >= used) given.table[i] = -7; /* it is not read */
    }
}

static problem make_problem(void)
{
    const int64_t batch = toss(4) ? draw(250, BATCH) : draw(1, 5);
    const bool packed_q = toss(2), paged = toss(2), packed_k = !paged && packed_q && toss(2);
    problem p = {.o = FA_OPTIONS_INIT};
    const int64_t rows_q = packed_q ? ROWS : draw(1, 9), rows_k = packed_k ? ROWS : draw(1, 9);
    make_side(&p.o, 0, batch, rows_q, packed_q);
    if (paged) make_pages(&p.o, batch);
    else make_side(&p.o, 1, batch, rows_k, packed_k);
    p.q = tensor(packed_q ? 1 : batch, rows_q);
    p.k = paged ? tensor(PAGES, PAGE) : tensor(packed_k ? 1 : batch, rows_k);
    p.rows_given = toss(2);
    p.num_rows = p.rows_given ? draw(1, WANTED) : rows_q;
    for (int64_t r = 0; r < p.num_rows && p.rows_given; r++) given.rows[r] = draw(0, rows_q - 1);
    /* fa_weights checks all arrays; without heads there is nothing to compute. */
    p.q.shape[2] = p.k.shape[2] = 0;
    p.weights = (fa_tensor){nothing, FA_FLOAT32, {batch, 0, p.num_rows, ROWS}, {0, 0, 0, 1}};
    if (!packed_k && !paged && !p.o.seqlens_k) p.weights.shape[3] = rows_k;
    return p;
}

/* Makes one entry of the arrays wrong, or a boundary case. */
static void spoil(problem *p)
{
    const int64_t batch = p->weights.shape[0];
    const int side = (int)draw(0, 1);
    const int32_t *cu = side ? p->o.cu_seqlens_k : p->o.cu_seqlens_q;
    const int32_t *lengths = side ? p->o.seqlens_k : p->o.seqlens_q;
    switch (draw(0, 6)) {
    case 0:
        if (cu) given.cu[side][0] = -(int32_t)draw(1, 9);
        return;
    case 1:
        if (cu) given.cu[side][draw(1, batch)] = -(int32_t)draw(0, 9);
        return;
    case 2:
        if (cu) given.cu[side][batch] = ROWS + (int32_t)draw(0, 2);
        return;
    case 3:
        if (lengths) given.lengths[side][draw(0, batch - 1)] = (int32_t)draw(-2, 40);
        return;
    case 4:
        if (cu) *(side ? &p->o.max_seqlen_k : &p->o.max_seqlen_q) = draw(1, 4);
        return;
    case 5:
        if (p->o.block_table)
            given.table[draw(0, batch * TABLE - 1)] =
                (int32_t)(toss(2) ? draw(PAGES - 1, PAGES + 1) : draw(-2, 0));
        return;
    default:
        if (p->rows_given) given.rows[draw(0, p->num_rows - 1)] = draw(-1, p->q.shape[1]);
    }
}

static fa_status on_the_host(const problem *p)
{
    return fa_weights(&p->q, &p->k, p->rows_given ? given.rows : NULL, p->num_rows, &p->weights,
                      &p->o);
}

static fa_status by_the_kernel(const problem *given_problem, int64_t number)
{
    const fa_arguments a = {.pass = FA_PASS_WEIGHTS,
                            .device = FA_DEVICE_CUDA,
                            .q_memory.ordinal = -1,
                            .q = &given_problem->q,
                            .k = &given_problem->k,
                            .rows = given_problem->rows_given ? given.rows : NULL,
                            .num_rows = given_problem->num_rows,
                            .weights = &given_problem->weights,
                            .options = &given_problem->o};
    fa_problem p;
    fa_check_params params;
    fa_check_report report;
    const fa_status status = fa_problem_make(&a, &p);
    CHECK(status == FA_OK, "number %lld: %s", (long long)number, fa_last_error());
    if (status != FA_OK || !fa_cuda_check_params(&p, &given_problem->o, &params)) return FA_OK;
    memset(&report, 0, sizeof report);
    params.report = &report;
    const cuda_run run = {.kernel = run_check_simt,
                          .parameters = &params,
                          .grid = 1,
                          .threads = FA_CHECK_THREADS,
                          .smem_bytes = FA_CHECK_SMEM,
                          .backwards = number % 2};
    cuda_run_kernel(&run);
    return report.kind == FA_CHECK_FINE ? FA_OK : fa_problem_report(&report, "found");
}

int main(int argc, char **argv)
{
    int64_t number = argc > 1 ? atoll(argv[1]) : 0;
    const bool whole = !sample_begin(argc > 1);
    const int64_t end = number + (argc > 2 ? atoll(argv[2]) : whole ? PROBLEMS : SAMPLE);
    int found[2] = {0, 0};
    test_begin();
    for (; number < end; number++) {
        char said[512] = "", kernel_said[512] = "";
        source = (ref_random){(uint64_t)number};
        problem p = make_problem();
        if (!toss(4)) spoil(&p);
        const fa_status host = on_the_host(&p);
        if (host != FA_OK) snprintf(said, sizeof said, "%s; found", fa_last_error());
        const fa_status device = by_the_kernel(&p, number);
        if (device != FA_OK) snprintf(kernel_said, sizeof kernel_said, "%s", fa_last_error());
        CHECK(host == device && strcmp(said, kernel_said) == 0,
              "number %lld: the host says \"%s\", the kernel \"%s\"", (long long)number, said,
              kernel_said);
        found[host != FA_OK]++;
    }
    printf("%d fine, %d wrong\n", found[0], found[1]);
    const int64_t least = (whole ? PROBLEMS : SAMPLE) / 10;
    CHECK(argc > 1 || (found[0] > least && found[1] > least), "one-sided");
    if (!whole)
        printf("%d of %d problems left out (FA_ALL_TESTS=1: all)\n", PROBLEMS - SAMPLE, PROBLEMS);
    return test_end();
}
