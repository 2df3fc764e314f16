/*
 * Random calls of fa_append, and what they must leave: computed in double, straight from the header.
 */
#ifndef TEST_APPEND_CASE_H
#define TEST_APPEND_CASE_H

#include "buffers.h"
#include "random.h"

enum { APPEND_MAX_BATCH = 5 };

typedef struct append_case {
    ref_random random;
    ref_buffers buffers;
    fa_append_options o;
    fa_tensor k_new, v_new, k_cache, v_cache, q, q_out, cos, sin, k_scale, v_scale;
    bool has_v, in_place;
    int32_t *after; /* lengths_after, or NULL */
    int32_t *table; /* block_table_after, or NULL */
    int32_t *rows;  /* row_table_after, or NULL */
    int32_t *cu;    /* cu_seqlens_after, or NULL */
    int64_t batch, n_new, n_q, heads_kv, heads_q, d, d_v;
    int64_t count_new[APPEND_MAX_BATCH], count_q[APPEND_MAX_BATCH]; /* of each sequence */
    char *before; /* all buffers, before the call */
    char text[400];
} append_case;

/* Draws a case: any lengths, tables, types and layouts that are right. Free it with append_case_free. */
void append_case_make(append_case *c, uint64_t seed);
void append_case_free(append_case *c);

/* The tensors of values; NULL where the case has none. */
const fa_tensor *append_case_v_new(const append_case *c);
const fa_tensor *append_case_v_cache(const append_case *c);

/* Compares what the call has left with what it must leave, element by element, also what it must not touch. */
void append_case_check(append_case *c, ref_report *report);

/* Entries of the lengths, tables and indices become wild numbers. append_case_check_inside: nothing beside the outputs
 * was written. */
void append_case_spoil(append_case *c);
void append_case_check_inside(const append_case *c, ref_report *report);

#endif
