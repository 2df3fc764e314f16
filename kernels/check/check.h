/* What FA_CHECK=1 checks on the device: the arrays of lengths and pages, and the rows of
 * fa_weights. The kernel, the backend and the code that writes the error message share this
 * file. */
#ifndef FA_KERNELS_CHECK_CHECK_H
#define FA_KERNELS_CHECK_CHECK_H

#include <stdint.h>

#define FA_CHECK_THREADS 256 /* of the only block */
#define FA_CHECK_SMEM (8 * FA_CHECK_THREADS)

/* What is wrong with an array, in the order of the checks: each relies on those before it. */
enum {
    FA_CHECK_FINE,
    FA_CHECK_FIRST,  /* cu_seqlens[0] is below 0                                                */
    FA_CHECK_ORDER,  /* cu_seqlens[index] is below the entry before it, `low`                   */
    FA_CHECK_LAST,   /* cu_seqlens[index], the last one, is above the rows there are, `high`    */
    FA_CHECK_LENGTH, /* seqlens[index] is below 0 or above the rows for it, `high` */
    FA_CHECK_MAX,    /* max_seqlen is below `low`, the length of sequence `index`               */
    FA_CHECK_PAGE,   /* block_table[index] is below 0 or not below the number of pages, `high`  */
    FA_CHECK_ROW     /* rows[index] is below 0 or not below q.shape[1], `high`                  */
};

/* The report that the kernel writes to host memory. kind is written last. */
typedef struct fa_check_report {
    int32_t kind; /* FA_CHECK_FINE: nothing is wrong */
    int32_t side; /* 0: of the queries, 1: of the keys */
    int64_t index, value, low, high;
    int64_t block_table_stride;
} fa_check_report;

/* The queries' or the keys' side. */
typedef struct fa_check_side {
    const int32_t *cu_seqlens, *seqlens;
    int64_t max_seqlen; /* 0: unknown */
    int64_t rows;       /* packed: rows of the tensor; otherwise the largest length of a sequence */
} fa_check_side;

typedef struct fa_check_params {
    fa_check_side side[2];
    int64_t batch;
    const int32_t *block_table;
    int64_t block_table_stride, page_rows, pages;
    const int64_t *rows; /* of fa_weights; NULL: all */
    int64_t num_rows, n_q;
    fa_check_report *report;
} fa_check_params;

#endif
