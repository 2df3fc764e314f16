/*
 * The five products of a tile. A consumer's scores are transposed: its 64 keys are the rows, 64
 * queries the columns. So weights and dS are already in the registers that dV and dK read. Only dQ
 * needs dS in shared memory.
 *
 *     S^T  = K Q^T       head dim 64: K from registers, because shared memory is the limit; 128:
 *                        from shared memory
 *     dP^T = V dO^T      the same
 *     dV  += P^T dO      P^T from registers
 *     dK  += dS^T Q      dS^T from registers
 *     dQ   = dS K        both from shared memory; a consumer computes DQ_COLUMNS columns from both
 *                        consumers' keys, and then DQ_REST columns, if there are any
 *     dQ^T = K^T dS^T    DQ_TRANSPOSED: all keys from registers; a consumer computes half of the
 *                        queries
 */
#ifndef FA_KERNELS_BACKWARD_SM90_MULTIPLY_CUH
#define FA_KERNELS_BACKWARD_SM90_MULTIPLY_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/pipeline.cuh"
#include "ptx/wgmma.cuh"

/* Descriptors count in units of 16 bytes. */
enum { UNIT = 16 };

/* Scores of a consumer's keys (rows) and a tile's queries. columns: descriptor of the queries'
 * first 64 columns. The keys are in `words`, or `rows` is their descriptor. dim: of queries and
 * keys. accumulate: 0 overwrites the scores. */
FA_DEVICE void issue_scores(float *scores, const uint32_t *words, uint32_t rows, uint32_t columns,
                            int dim, int accumulate)
{
    __asm__ volatile(""
                     : "+r"(rows)); /* keeps the compiler from holding a descriptor for each step */
#pragma unroll
    for (int step = 0; step < dim / 16; step++) {
        const uint64_t b = ptx_descriptor(columns + (step / 4 * Q_BLOCK + step % 4 * 32) / UNIT);
#if KEYS_IN_REGISTERS
        PTX_WGMMA(registers_qk, QUERIES)(scores, words + 4 * step, b, accumulate || step > 0);
#else
        (void)words;
        PTX_WGMMA(qk, QUERIES)
        (scores, ptx_descriptor(rows + (step / 4 * KEY_BLOCK + step % 4 * 32) / UNIT), b,
         accumulate || step > 0);
#endif
    }
    ptx_wgmma_commit();
}

/* dK += dS times a tile of queries, which is read across its rows. */
FA_DEVICE void issue_dk(float *dk, const uint32_t *ds, uint32_t tile)
{
#pragma unroll
    for (int step = 0; step < QUERIES / 16; step++) PTX_WGMMA(pv, SUM_DIM)
    (dk, ds + 4 * step, ptx_descriptor(tile + step * 16 * 128 / UNIT), 1);
    ptx_wgmma_commit();
}

/* dV += weights times a tile of dout, in the same way. */
FA_DEVICE void issue_dv(float *dv, const uint32_t *weights, uint32_t tile)
{
#pragma unroll
    for (int step = 0; step < QUERIES / 16; step++) PTX_WGMMA(pv, VALUE_DIM)
    (dv, weights + 4 * step, ptx_descriptor(tile + step * 16 * 128 / UNIT), 1);
    ptx_wgmma_commit();
}

FA_DEVICE void issue_dq(float *dq, uint32_t ds, uint32_t keys)
{
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) PTX_WGMMA(shared_pv, DQ_COLUMNS)
    (dq, ptx_descriptor(ds + (step / 4 * Q_BLOCK + step % 4 * 32) / UNIT),
     ptx_descriptor(keys + step * 16 * 128 / UNIT), step > 0);
    ptx_wgmma_commit();
}

#if DQ_TRANSPOSED

/* dQ of half of the queries, transposed. keys: words of all keys; ds: the queries' first row. */
FA_DEVICE void issue_transposed_dq(float *dq, const uint32_t *keys, uint32_t ds)
{
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) PTX_WGMMA(registers_qk, DQ_COLUMNS)
    (dq, keys + 4 * step, ptx_descriptor(ds + (step / 4 * Q_BLOCK + step % 4 * 32) / UNIT),
     step > 0);
    ptx_wgmma_commit();
}

#endif

#if DQ_PARTS > 1

/* dK, with dS from shared memory, which is read across its rows as well. ds: the consumer's
 * half. */
FA_DEVICE void issue_shared_dk(float *dk, uint32_t ds, uint32_t tile)
{
#pragma unroll
    for (int step = 0; step < QUERIES / 16; step++) PTX_WGMMA(across, SUM_DIM)
    (dk, ptx_descriptor(ds + step * 16 * 128 / UNIT), ptx_descriptor(tile + step * 16 * 128 / UNIT),
     1);
    ptx_wgmma_commit();
}

FA_DEVICE void issue_dq_rest(float *dq, uint32_t ds, uint32_t keys)
{
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) PTX_WGMMA(shared_pv, DQ_REST)
    (dq, ptx_descriptor(ds + (step / 4 * Q_BLOCK + step % 4 * 32) / UNIT),
     ptx_descriptor(keys + step * 16 * 128 / UNIT), step > 0);
    ptx_wgmma_commit();
}

#endif

/* The same as ptx_register_fence, for operands that products still read. */
FA_DEVICE void keep_operands(uint32_t *x2)
{
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) __asm__ volatile("" : "+r"(x2[i])::"memory");
}

#endif
