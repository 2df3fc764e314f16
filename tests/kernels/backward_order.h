/*
 * The orders in which blocks of backward_sm90 take work, for test_backward_order.c: functions of
 * work.cuh and joined.cuh, compiled for the host.
 */
#ifndef FA_TEST_BACKWARD_ORDER_H
#define FA_TEST_BACKWARD_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "../../kernels/backward_sm90/backward_sm90.h"

enum { ORDER_MULTIPLIES, ORDER_PREPARES, ORDER_FINISHES, ORDER_KINDS };

/* What a block does: the kind of its work, and the task or the slice of rows. ascends: only where sums
 * of dQ have one order. */
typedef struct order_place {
    int kind;
    int64_t number;
    bool ascends;
} order_place;

typedef order_place order_function(const fa_attention_params *p, const fa_backward_sm90_params *s,
                                   int64_t block);

/* Of variants for sums in any order, for sums in one order, and of those with joined launches. */
order_function order_of_any, order_of_ordered, order_of_joined;

#endif
