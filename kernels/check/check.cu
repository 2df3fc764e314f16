/*
 * FA_CHECK=1: checks a call's lengths, block table and rows on the device, and reports the first
 * wrong entry in memory that the host reads. A single block does everything, because speed does not
 * matter here.
 *
 * Threads check the entries of one kind in parallel. The lowest wrong index is reported, so a
 * report does not depend on the order. The next kind is checked only if nothing was found: page
 * numbers are read only as far as lengths reach, so the lengths must be right.
 */
#include "common/device.cuh"
#include "check/check.h"

enum { THREADS = FA_CHECK_THREADS };

#define NOTHING INT64_MAX

/* The number of rows for sequence b, and its length. */
FA_DEVICE int64_t find_room(const fa_check_side *s, int64_t b)
{
    return s->cu_seqlens ? (int64_t)s->cu_seqlens[b + 1] - s->cu_seqlens[b] : s->rows;
}

FA_DEVICE int64_t find_length(const fa_check_side *s, int64_t b)
{
    return s->seqlens ? s->seqlens[b] : find_room(s, b);
}

/* The number of pages that sequence b's keys use. */
FA_DEVICE int64_t find_pages(const fa_check_params *p, int64_t b)
{
    return (find_length(&p->side[1], b) + p->page_rows - 1) / p->page_rows;
}

/* The number of entries of a kind. max_pages: of the longest sequence. */
FA_DEVICE int64_t count_entries(const fa_check_params *p, const fa_check_side *s, int kind,
                                int64_t max_pages)
{
    switch (kind) {
    case FA_CHECK_FIRST:
    case FA_CHECK_LAST: return s->cu_seqlens ? 1 : 0;
    case FA_CHECK_ORDER: return s->cu_seqlens ? p->batch : 0;
    case FA_CHECK_LENGTH: return s->seqlens ? p->batch : 0;
    case FA_CHECK_MAX: return s->max_seqlen > 0 ? p->batch : 0;
    case FA_CHECK_PAGE: return p->block_table ? p->batch * max_pages : 0;
    default: return p->rows ? p->num_rows : 0;
    }
}

/* Whether entry n of a kind is wrong. Also sets the numbers of its report. */
FA_DEVICE bool is_wrong(const fa_check_params *p, const fa_check_side *s, int kind, int64_t n,
                        int64_t max_pages, fa_check_report *r)
{
    r->index = n;
    r->low = 0;
    r->high = s->rows;
    switch (kind) {
    case FA_CHECK_FIRST: r->value = s->cu_seqlens[0]; return r->value < 0;
    case FA_CHECK_ORDER:
        r->index = n + 1;
        r->low = s->cu_seqlens[n];
        r->value = s->cu_seqlens[n + 1];
        return r->value < r->low;
    case FA_CHECK_LAST:
        r->index = p->batch;
        r->value = s->cu_seqlens[p->batch];
        return r->value > r->high;
    case FA_CHECK_LENGTH:
        r->high = find_room(s, n);
        r->value = s->seqlens[n];
        return r->value < 0 || r->value > r->high;
    case FA_CHECK_MAX:
        r->low = find_length(s, n);
        r->value = s->max_seqlen;
        return r->value < r->low;
    case FA_CHECK_PAGE:
        r->index = n / max_pages * p->block_table_stride + n % max_pages;
        r->high = p->pages;
        if (n % max_pages >= find_pages(p, n / max_pages)) return false;
        r->value = p->block_table[r->index];
        return r->value < 0 || r->value >= r->high;
    default:
        r->high = p->n_q;
        r->value = p->rows[n];
        return r->value < 0 || r->value >= r->high;
    }
}

/* The min of all threads' numbers. */
FA_DEVICE int64_t find_min(int64_t *numbers, int64_t mine)
{
    numbers[threadIdx.x] = mine;
#pragma unroll 1
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half && numbers[threadIdx.x + half] < numbers[threadIdx.x])
            numbers[threadIdx.x] = numbers[threadIdx.x + half];
    }
    __syncthreads();
    const int64_t lowest = numbers[0];
    __syncthreads(); /* before the array is used again */
    return lowest;
}

/* Checks one kind. All threads get the result: whether something was found. */
FA_DEVICE bool look_for(const fa_check_params *p, int side, int kind, int64_t max_pages,
                        int64_t *numbers)
{
    const fa_check_side *s = &p->side[side];
    const int64_t count = count_entries(p, s, kind, max_pages);
    fa_check_report r = {0};
    int64_t n = threadIdx.x;
#pragma unroll 1
    while (n < count && !is_wrong(p, s, kind, n, max_pages, &r)) n += THREADS;
    const int64_t first = find_min(numbers, n < count ? n : NOTHING);
    if (first == NOTHING) return false;
    if (n == first && n < count) { /* this thread found it */
        p->report->side = side;
        p->report->index = r.index;
        p->report->value = r.value;
        p->report->low = r.low;
        p->report->high = r.high;
        p->report->block_table_stride = p->block_table_stride;
        __threadfence_system();
        *(volatile int32_t *)&p->report->kind = kind;
    }
    return true;
}

FA_DEVICE int64_t find_max_pages(const fa_check_params *p, int64_t *numbers)
{
    int64_t max_pages = 0;
#pragma unroll 1
    for (int64_t b = threadIdx.x; p->block_table && b < p->batch; b += THREADS) {
        const int64_t pages = find_pages(p, b);
        if (pages > max_pages) max_pages = pages;
    }
    return -find_min(numbers, -max_pages);
}

FA_KERNEL __launch_bounds__(THREADS, 1) check_simt(const __grid_constant__ fa_check_params p)
{
    FA_DYNAMIC_SHARED(memory);
    int64_t *numbers = (int64_t *)(void *)memory;
    int64_t max_pages = 0;
#pragma unroll 1
    for (int side = 0; side < 2; side++)
#pragma unroll 1
        for (int kind = FA_CHECK_FIRST; kind <= FA_CHECK_MAX; kind++)
            if (look_for(&p, side, kind, 0, numbers)) return;
    max_pages = find_max_pages(&p, numbers);
    if (look_for(&p, 1, FA_CHECK_PAGE, max_pages, numbers)) return;
    look_for(&p, 0, FA_CHECK_ROW, 0, numbers);
}
