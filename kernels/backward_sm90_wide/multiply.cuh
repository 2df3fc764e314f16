/*
 * The five products of a tile. Scores are transposed: the block's 64 keys are the rows, 64 queries
 * the columns. So weights and dS are already in the registers that dV and dK read. Only dQ needs dS
 * in shared memory.
 *
 *     S^T  = K Q^T       both from shared memory
 *     dP^T = V dO^T      the same
 *     dV  += P^T dO      P^T from registers
 *     dK  += dS^T Q      dS^T from registers
 *     dQ   = dS K        both from shared memory, DQ_COLUMNS columns at once
 */
#ifndef FA_KERNELS_BACKWARD_SM90_WIDE_MULTIPLY_CUH
#define FA_KERNELS_BACKWARD_SM90_WIDE_MULTIPLY_CUH

#include "backward_sm90_wide/config.cuh"
#include "backward_sm90_wide/pipeline.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

/* Descriptors count in units of 16 bytes. */
enum { UNIT = 16 };

/* Descriptors of operands that are read across their rows. */
#define ACROSS(block) ((uint32_t)((block) / UNIT) << 16)

/* Scores of the keys (rows) and a tile's queries. rows, columns: descriptors of their first 64
 * columns; dim: of them. */
FA_DEVICE void issue_scores(float *scores, uint32_t rows, uint32_t columns, int dim)
{
    __asm__ volatile(""
                     : "+r"(rows)); /* keeps the compiler from holding a descriptor for each step */
#pragma unroll
    for (int step = 0; step < dim / 16; step++) PTX_WGMMA(qk, QUERIES)
    (scores, ptx_descriptor(rows + (step / 4 * KEY_BLOCK + step % 4 * 32) / UNIT),
     ptx_descriptor(columns + (step / 4 * Q_BLOCK + step % 4 * 32) / UNIT), step > 0);
    ptx_wgmma_commit();
}

/* Descriptors of the steps along the rows of an operand. In uniform registers that each hold the result of
 * a reduction: the assembler cannot compute it again. It would do so between products otherwise (from a
 * loop in a loop, or where registers are few), and each product would then wait for its descriptor. */
typedef struct pinned_rows {
    uint32_t steps[HEAD_DIM / 16];
} pinned_rows;

FA_DEVICE uint32_t step_at(uint32_t rows, int step)
{
    return rows + (uint32_t)(step / 4 * KEY_BLOCK + step % 4 * 32) / UNIT;
}

FA_DEVICE pinned_rows pin_rows(uint32_t rows)
{
    pinned_rows pinned;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
        pinned.steps[step] = ptx_uniform(step_at(rows, step));
    return pinned;
}

/* The same as issue_scores with rows that are pinned; columns as well, or NULL. */
FA_DEVICE void issue_pinned_scores(float *scores, const pinned_rows *rows,
                                   const pinned_rows *pinned_columns, uint32_t columns)
{
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) PTX_WGMMA(qk, QUERIES)
    (scores, ptx_descriptor(rows->steps[step]),
     ptx_descriptor(pinned_columns ? pinned_columns->steps[step] : step_at(columns, step)),
     step > 0);
    ptx_wgmma_commit();
}

/* sums += weights times a tile of `dim` columns, which is read across its rows. A product has at
 * most 128 columns: wider ones take more registers than a thread of such a large block has at the
 * start, and the assembler refuses this. */
FA_DEVICE void issue_gradient(float *sums, const uint32_t *weights, uint32_t tile, int dim)
{
#pragma unroll
    for (int column = 0; column + 128 <= dim; column += 128)
#pragma unroll
        for (int step = 0; step < QUERIES / 16; step++)
            ptx_wgmma_pv_128(
                sums + column / 2, weights + 4 * step,
                ptx_descriptor(tile + (column / 64 * Q_BLOCK + step * 16 * 128) / UNIT), 1);
#pragma unroll
    for (int step = 0; step < QUERIES / 16 && dim % 128; step++)
        ptx_wgmma_pv_64(sums + dim / 128 * 64, weights + 4 * step,
                        ptx_descriptor(tile + (dim / 128 * 2 * Q_BLOCK + step * 16 * 128) / UNIT),
                        1);
    ptx_wgmma_commit();
}

/* Issues dQ (+)= dS K in DQ_COLUMNS columns. keys: their descriptor; accumulate 0: dq is
 * overwritten. */
FA_DEVICE void issue_dq(float *dq, uint32_t ds, uint32_t keys, int accumulate)
{
#pragma unroll
    for (int step = 0; step < BLOCK_KEYS / 16; step++) PTX_WGMMA(shared_pv, DQ_COLUMNS)
    (dq, ptx_descriptor(ds + step * 32 / UNIT), ptx_descriptor(keys + step * 16 * 128 / UNIT),
     accumulate || step > 0);
    ptx_wgmma_commit();
}

/* The same of DQ_REST columns. */
FA_DEVICE void issue_dq_rest(float *rest, uint32_t ds, uint32_t keys, int accumulate)
{
#pragma unroll
    for (int step = 0; step < BLOCK_KEYS / 16; step++) PTX_WGMMA(shared_pv, DQ_REST)
    (rest, ptx_descriptor(ds + step * 32 / UNIT), ptx_descriptor(keys + step * 16 * 128 / UNIT),
     accumulate || step > 0);
    ptx_wgmma_commit();
}

/* The same as ptx_register_fence, for operands that products still read. */
FA_DEVICE void keep_operands(uint32_t *x2)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) __asm__ volatile("" : "+r"(x2[i])::"memory");
}

#endif
