/*
 * Small kernels that use Hopper's units, for test_hopper_units.c: correct ones, and ones with
 * deliberate errors.
 */
#ifndef FA_TEST_HOPPER_UNITS_KERNELS_H
#define FA_TEST_HOPPER_UNITS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

typedef enum mistake {
    NO_MISTAKE,
    LOAD_FEWER_BYTES,    /* than the barrier expects */
    LOAD_MORE_BYTES,     /* the same */
    LOAD_ODD_BYTES,      /* no multiple of 16 */
    LOAD_MISALIGNED,     /* in global memory */
    LOAD_TO_MISALIGNED,  /* in shared memory */
    LOAD_OUTSIDE,        /* the caller's buffer */
    LOAD_NOT_WAITED_FOR, /* it is NaN if copies are late */
    ADD_WITHOUT_FENCE,
    ADD_WITHOUT_FENCE_OF_ONE, /* thread of the block */
    ADD_WITHOUT_BARRIER,      /* between stores and the addition */
    ADD_ODD_BYTES,
    ADD_OUTSIDE,
    ADD_NOT_COMMITTED,
    SOURCE_NOT_WAITED_FOR, /* before it is overwritten */
    END_NOT_WAITED_FOR,    /* by the block */
    MISTAKES
} mistake;

enum { UNITS_THREADS = 128, SUM_STEPS = 3, SUM_FLOATS = UNITS_THREADS };

/* to[i] += 1000 * from[i] + step, for each step; and to[SUM_FLOATS] to the next 4: (big, -big, 1),
 * as four floats each, in this order if `ordered`. */
typedef struct sums_parameters {
    float *to;
    const float *from;
    int ordered;
    mistake mistake;
} sums_parameters;
void sum_rows(sums_parameters p);

/* The halves of x[matrix][lane] are stored to shared memory through stmatrix, plain and transposed:
 * plain[lane / 8][lane % 8][8]; then ldmatrix reads them back, transposed again. Each of four warps
 * does the same. */
typedef struct matrices_parameters {
    const uint32_t (*x)[32];
    uint16_t *stored; /* warp, matrix, row, column */
    uint32_t (*back)[4][32];
} matrices_parameters;
void turn_matrices(matrices_parameters p);

/* d = a b, with a 64 x 64 and b 64 x 64 in the 128-byte swizzle: columns first to first + 31 of d.
 * B_ALONG_ROWS: b is transposed; A_ACROSS_ROWS: both are. */
typedef enum operand { A_IN_SHARED, A_IN_REGISTERS, B_ALONG_ROWS, A_ACROSS_ROWS } operand;
typedef struct product_parameters {
    const uint16_t *a, *b; /* bfloat16 */
    float *d;              /* 64 x 32 */
    int first;
    operand how;
    int unfenced; /* the thread that makes no fence; -1: all threads make one */
    int other;    /* the thread that issues other products; -1: none does */
} product_parameters;
void multiply_columns(product_parameters p);

/* A warp arrives at a barrier, then waits twice at a named one. Another warp waits at the first
 * barrier and arrives twice at the named one, without a wait in between: too early if the first warp
 * is slow behind its arrival. named: the first barrier is a named one, too. */
typedef struct turns_parameters {
    int named;
} turns_parameters;
void take_turns(turns_parameters p);

enum { SUMS_SMEM = 4096, MATRICES_SMEM = 4 * 4 * 128 + 128, PRODUCT_SMEM = 2 * 64 * 128 + 1024 };

#endif
