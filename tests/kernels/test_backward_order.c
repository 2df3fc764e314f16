/*
 * Blocks of backward_sm90 take each work tile once, whatever the numbers of heads and of key tiles and
 * however many heads take turns, and a block waits only for blocks of lower numbers.
 */
#include <stdlib.h>
#include <string.h>

#include "backward_order.h"
#include "check.h"
#include "cuda/plan_backward_sm90.h"

enum { MOST_HEADS = 70, MOST_TILES = 9, MOST_SLICES = 3 };

/* A problem: heads, or units, of `tiles` key tiles each; joined: of `slices` slices of rows each. */
typedef struct order_case {
    order_function *of;
    int heads, tiles, slices;
    fa_attention_params p;
    fa_backward_sm90_params s;
} order_case;

/* The block that does each work; -1: none. */
static int64_t done_by[ORDER_KINDS][MOST_HEADS * MOST_TILES];
static bool ascends[MOST_HEADS];

static int count_works(const order_case *c, int kind)
{
    return c->heads * (kind == ORDER_MULTIPLIES ? c->tiles : c->slices);
}

static bool find_blocks(const order_case *c)
{
    const int blocks = c->heads * (c->tiles + 2 * c->slices);
    memset(done_by, 0xff, sizeof done_by);
    for (int64_t block = 0; block < blocks; block++) {
        const order_place at = c->of(&c->p, &c->s, block);
        if (at.number < 0 || at.number >= count_works(c, at.kind)) return false;
        if (done_by[at.kind][at.number] >= 0) return false; /* then another one is left out */
        done_by[at.kind][at.number] = block;
        if (at.kind == ORDER_MULTIPLIES) ascends[at.number / c->tiles] = at.ascends;
    }
    return true;
}

/* Whether a head's key tiles follow each other: they add dQ in this order. */
static bool is_in_order(const order_case *c, int head)
{
    const int64_t *block = done_by[ORDER_MULTIPLIES] + head * c->tiles;
    for (int i = 1; i < c->tiles; i++)
        if (ascends[head] ? block[i - 1] < block[i] : block[i - 1] > block[i]) return false;
    return true;
}

/* Joined launches: rows are prepared before a head's blocks multiply, which come before its sums
 * become dQ. */
static bool comes_between(const order_case *c, int head)
{
    for (int tile = 0; tile < c->tiles; tile++) {
        const int64_t block = done_by[ORDER_MULTIPLIES][head * c->tiles + tile];
        for (int i = head * c->slices; i < (head + 1) * c->slices; i++)
            if (done_by[ORDER_PREPARES][i] > block || done_by[ORDER_FINISHES][i] < block)
                return false;
    }
    return true;
}

static void check_case(order_case *c, const char *what)
{
    fa_cuda_backward_sm90_set_divisors(c->tiles, c->p.tasks, 1, 1, &c->s);
    bool right = find_blocks(c);
    for (int head = 0; head < c->heads && right; head++)
        right = is_in_order(c, head) && comes_between(c, head);
    CHECK(right, "%s: %d heads, %d key tiles, %d slices, %lld in turn, %d ascend, %d in turn", what,
          c->heads, c->tiles, c->slices, (long long)c->s.heads_together, (int)c->s.heads_ascending,
          (int)c->s.ascending_together);
}

static order_case make_case(order_function *of, int heads, int tiles)
{
    order_case c = {.of = of, .heads = heads, .tiles = tiles};
    c.p.tiles = tiles;
    c.p.tasks = heads * tiles;
    c.s.items_together = 1;
    return c;
}

int main(void)
{
    test_begin();
    for (int tiles = 1; tiles <= MOST_TILES; tiles++)
        for (int heads = 1; heads <= MOST_HEADS; heads++)
            for (int together = 1; together <= heads; together++) {
                order_case c = make_case(order_of_any, heads, tiles);
                c.s.heads_together = together;
                check_case(&c, "any order");
                c.s.first_ahead = 1;
                check_case(&c, "first blocks ahead");

                c = make_case(order_of_ordered, heads, tiles);
                c.s.heads_together = together;
                check_case(&c, "one order");
                c.s.heads_ascending = heads - together; /* the others take turns */
                for (int ascending = 1; ascending <= 5; ascending++) {
                    c.s.ascending_together = ascending;
                    check_case(&c, "blocks ascend");
                }

                c.s.heads_together = 0; /* as where sums do not depend on the batch */
                c.s.heads_ascending = heads;
                c.s.ascending_together = together;
                check_case(&c, "all blocks ascend");

                c = make_case(order_of_joined, heads, tiles);
                c.slices = 1 + heads % MOST_SLICES;
                c.s.heads_together = together;
                c.s.units = heads;
                c.s.units_together = together;
                c.s.slices = c.slices;
                check_case(&c, "joined, blocks take turns");
                c.s.heads_together = 1;
                check_case(&c, "joined");
            }
    return test_end();
}
