/*
 * Hopper's units on the host (hopper_units.h) by themselves: small kernels compute correct results
 * with them, and a kernel with a deliberate error ends with a message about it.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "buffers.h"
#include "check.h"
#include "convert.h"
#include "hopper_units.h"
#include "hopper_units_kernels.h"

#define RUN(name, type)                                                                            \
    static void run_##name(const void *p) { name(*(const type *)p); }
RUN(sum_rows, sums_parameters)
RUN(turn_matrices, matrices_parameters)
RUN(multiply_columns, product_parameters)
RUN(take_turns, turns_parameters)

/* All orders and delays, as bits of `how`; and a slow warp. */
enum { BACKWARDS = 1, LATE_COPIES = 2, LATE_PRODUCTS = 4, WAYS = 8, SLOW = 8 };

static void run(void (*kernel)(const void *), const void *parameters, unsigned bytes, int how,
                const ref_buffers *memory)
{
    const cuda_run r = {.kernel = kernel,
                        .parameters = parameters,
                        .grid = 1,
                        .threads = UNITS_THREADS,
                        .smem_bytes = bytes,
                        .units = &hopper_units,
                        .memory = memory,
                        .backwards = how & BACKWARDS,
                        .late_copies = how & LATE_COPIES,
                        .late_products = how & LATE_PRODUCTS,
                        .slow_lanes = how & SLOW ? ~0u : 0};
    cuda_run_kernel(&r);
}

/* ---- Sums ------------------------------------------------------------------------------------ */

/* Not variables of the program, which every kernel may access. */
static float *from, *to;

static float *allocate(size_t floats)
{
    float *memory = aligned_alloc(64, floats * sizeof *memory);
    if (!memory) abort();
    return memory;
}

static void run_sums(mistake m, bool ordered, int how)
{
    const sums_parameters p = {.to = to, .from = from, .ordered = ordered, .mistake = m};
    static ref_buffers memory = {.count = 2};
    memory.list[0] = (ref_buffer){
        .name = "from", .data = (char *)from, .bytes = (SUM_FLOATS + 4) * sizeof *from};
    memory.list[1] =
        (ref_buffer){.name = "to", .data = (char *)to, .bytes = (SUM_FLOATS + 4) * sizeof *to};
    for (int i = 0; i < SUM_FLOATS; i++) from[i] = (float)i, to[i] = 7;
    for (int i = 0; i < 4; i++) to[SUM_FLOATS + i] = 0;
    run(run_sum_rows, &p, SUMS_SMEM, how, &memory);
}

static void check_sums(void)
{
    for (int how = 0; how < WAYS; how++)
        for (int ordered = 0; ordered < 2; ordered++) {
            run_sums(NO_MISTAKE, ordered, how);
            for (int i = 0; i < SUM_FLOATS; i++)
                CHECK(to[i] == (float)(3000 * i + 10), "way %d: sum %d is %g", how, i,
                      (double)to[i]);
            /* In the reverse order, 1 is lost in the large number. */
            const bool turned = how & BACKWARDS && how & LATE_COPIES && !ordered;
            for (int i = 0; i < 4; i++)
                CHECK(to[SUM_FLOATS + i] == (turned ? 0 : 1), "way %d, ordered %d: %g", how,
                      ordered, (double)to[SUM_FLOATS + i]);
        }
    run_sums(LOAD_NOT_WAITED_FOR, false, LATE_COPIES);
    for (int i = 0; i < SUM_FLOATS; i++)
        CHECK(isnan(to[i]), "what was not waited for is there: %d", i);
}

/* ---- Matrices -------------------------------------------------------------------------------- */

static void check_matrices(int how)
{
    static uint32_t x[4][32], back[4][4][32];
    static uint16_t stored[4][4][8][8];
    const matrices_parameters p = {(const uint32_t(*)[32])x, &stored[0][0][0][0], back};
    for (uint32_t i = 0; i < 128; i++) x[i / 32][i % 32] = 2 * i | (2 * i + 1) << 16;
    run(run_turn_matrices, &p, MATRICES_SMEM, how, NULL);
    for (int warp = 0; warp < 4; warp++)
        for (int i = 0; i < 4; i++)
            for (int lane = 0; lane < 32; lane++) {
                const int g = lane / 4, t = lane % 4;
                const uint32_t low = stored[warp][i][2 * t][g],
                               high = stored[warp][i][2 * t + 1][g];
                CHECK((low | high << 16) == x[i][lane], "warp %d, matrix %d, lane %d", warp, i,
                      lane);
                CHECK(back[warp][i][lane] == x[i][lane], "read back: warp %d, matrix %d, lane %d",
                      warp, i, lane);
            }
}

/* ---- Products -------------------------------------------------------------------------------- */

static _Alignas(16) uint16_t a[64][64], b[64][64];
static float d[64][32];

static void run_product(int first, operand kind, int unfenced, int other, int how)
{
    const product_parameters p = {&a[0][0], &b[0][0], &d[0][0], first, kind, unfenced, other};
    /* Small whole numbers: every sum is exact. */
    for (int i = 0; i < 64 * 64; i++) {
        a[i / 64][i % 64] = fa_float_to_bfloat((float)(i * 37 % 17 - 8));
        b[i / 64][i % 64] = fa_float_to_bfloat((float)(i * 53 % 23 - 11));
    }
    run(run_multiply_columns, &p, PRODUCT_SMEM, how, NULL);
}

static void check_product(int first, operand kind, int how)
{
    run_product(first, kind, -1, -1, how);
    for (int r = 0; r < 64; r++)
        for (int c = 0; c < 32; c++) {
            float want = 0;
            for (int k = 0; k < 64; k++)
                want +=
                    fa_bfloat_to_float(kind == A_ACROSS_ROWS ? a[k][r] : a[r][k]) *
                    fa_bfloat_to_float(kind >= B_ALONG_ROWS ? b[first + c][k] : b[k][first + c]);
            CHECK(d[r][c] == want, "columns from %d, kind %d, way %d: (%d, %d) is %g, not %g",
                  first, (int)kind, how, r, c, (double)d[r][c], (double)want);
        }
}

/* ---- Turns ----------------------------------------------------------------------------------- */

static void run_turns(int named, int how)
{
    const turns_parameters p = {named};
    run(run_take_turns, &p, 128, how, NULL);
}

/* ---- Errors ---------------------------------------------------------------------------------- */

/* Each occurs in every run, or only in some. */
static void make_mistake(int number, int how)
{
    if (number < MISTAKES) run_sums((mistake)number, false, how);
    else if (number == MISTAKES) run_product(48, A_IN_SHARED, -1, -1, how);
    else if (number == MISTAKES + 1) run_product(32, A_IN_SHARED, 100, -1, how);
    else if (number == MISTAKES + 2) run_product(16, A_IN_SHARED, -1, 77, how);
    else run_turns(number == MISTAKES + 4, how | SLOW);
}

static const struct {
    int number, way; /* -1: in every run */
    const char *message;
} mistakes[] = {
    {LOAD_FEWER_BYTES, -1, "lacks 0 of 1 arrivals, 16 bytes"},
    {LOAD_MORE_BYTES, -1, "bytes and expects"},
    {LOAD_ODD_BYTES, -1, "a bulk copy of 504 bytes"},
    {LOAD_MISALIGNED, -1, "misaligned in global memory"},
    {LOAD_TO_MISALIGNED, -1, "misaligned in shared memory"},
    {LOAD_OUTSIDE, -1, "outside all buffers, at byte 0 of from"},
    {ADD_WITHOUT_FENCE, -1, "without a fence"},
    {ADD_WITHOUT_FENCE_OF_ONE, -1, "without a fence"},
    {ADD_WITHOUT_BARRIER, 0, "has changed before it was waited for"},
    {ADD_ODD_BYTES, -1, "a bulk copy of 508 bytes"},
    {ADD_OUTSIDE, -1, "outside all buffers"},
    {ADD_NOT_COMMITTED, -1, "has changed before it was waited for"},
    {SOURCE_NOT_WAITED_FOR, -1, "has changed before it was waited for"},
    {END_NOT_WAITED_FOR, -1, "may still read its source"},
    {MISTAKES, -1, "starts within a row's 128 bytes and leaves them"},
    {MISTAKES + 1, -1, "without a fence"},
    {MISTAKES + 2, -1, "issue different products"},
    {MISTAKES + 3, -1, "arrives at named barrier 2 again"},
    {MISTAKES + 4, -1, "arrives at named barrier 2 again"},
};

/* In another process, which must abort; returns its messages. */
static void look_at_mistake(int number, int how, char *text, size_t size)
{
    int ends[2], status;
    size_t length = 0;
    fflush(NULL);
    if (pipe(ends) != 0) abort();
    const pid_t child = fork();
    if (child < 0) abort();
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        dup2(ends[1], STDERR_FILENO);
        make_mistake(number, how);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t n = 1; n > 0; length += n > 0 ? (size_t)n : 0)
        n = read(ends[0], text + length, size - 1 - length);
    text[length] = 0;
    close(ends[0]);
    if (waitpid(child, &status, 0) != child) abort();
    CHECK(WIFSIGNALED(status), "mistake %d, way %d: the run went on: %s", number, how, text);
}

static void check_mistakes(void)
{
    char text[8192];
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++)
        for (int how = 0; how < WAYS; how++) {
            if (mistakes[i].way >= 0 && mistakes[i].way != how) continue;
            look_at_mistake(mistakes[i].number, how, text, sizeof text);
            CHECK(strstr(text, mistakes[i].message), "mistake %d, way %d: %s, not %s",
                  mistakes[i].number, how, text, mistakes[i].message);
        }
}

int main(void)
{
    test_begin();
    from = allocate(SUM_FLOATS + 16);
    to = allocate(SUM_FLOATS + 16);
    check_sums();
    for (int how = 0; how < WAYS; how++) {
        check_matrices(how);
        for (int named = 0; named < 2; named++) run_turns(named, how); /* nobody is slow */
        for (int first = 0; first <= 32; first += 8)
            for (operand kind = A_IN_SHARED; kind <= A_ACROSS_ROWS; kind++)
                check_product(first, kind, how);
    }
    check_mistakes();
    free(from);
    free(to);
    return test_end();
}
