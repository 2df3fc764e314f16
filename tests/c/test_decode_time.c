/*
 * The model of the time by which decode_sm90 cuts keys: what must hold for all cuts, and cuts that were timed.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "check.h"
#include "cuda/plan_decode_time.h"

enum { SMS = 132 };

static fa_decode_keys make_keys(int64_t tasks, int64_t tiles, int head_dim, int rows)
{
    return (fa_decode_keys){.tasks = tasks,
                            .tiles = tiles,
                            .tile_bytes = (head_dim == 64 ? 128.0 : 64.0) * 4 * head_dim,
                            .rows = rows,
                            .head_dim = head_dim,
                            .multiprocessors = SMS};
}

static double time_of(const fa_decode_keys *k, int64_t whole, int64_t length)
{
    fa_decode_cut cut = {whole, length, 0.0, false};
    fa_cuda_time_cut(k, &cut);
    return cut.us;
}

static uint32_t state = 12345;
static int64_t draw(int64_t least, int64_t most)
{
    state = state * 1664525u + 1013904223u;
    return least + (int64_t)(state >> 8) % (most - least + 1);
}

/* No cut reads faster than the memory, nor faster than its longest block; and it takes no longer than the blocks one after another
 * on each multiprocessor, twice. */
static void test_limits(void)
{
    static const int dims[] = {64, 128, 192, 256};
    for (int i = 0; i < 3000; i++) {
        const int dim = dims[draw(0, 3)];
        const fa_decode_keys k = make_keys(draw(1, 700), draw(1, 300), dim, draw(0, 1) ? 8 : 16);
        const int64_t length = draw(1, k.tiles), whole = draw(0, 3) ? 0 : draw(0, k.tasks - 1);
        const double us = time_of(&k, whole, length),
                     all = (double)(k.tasks * k.tiles) * k.tile_bytes;
        const double longest = (double)(whole > 0 ? k.tiles : length) * k.tile_bytes;
        CHECK(isfinite(us) && us >= all / 4.8e6 && us >= longest / 110e3, "%d: %g us of %g bytes",
              i, us, all);
        const int64_t parts = (k.tiles + length - 1) / length,
                      rounds = ((k.tasks - whole) * parts + whole) / (2 * SMS) + 1;
        CHECK(us < 20 + 3 * all / 4.5e6 + (double)rounds * (3 + longest / 20e3), "%d: %g us", i,
              us);
    }
}

/* The chosen cut is no slower than one part, and has no more parts than it may. */
static void test_choice(void)
{
    for (int i = 0; i < 3000; i++) {
        const fa_decode_keys k = make_keys(draw(1, 3000), draw(1, 300), 128, draw(0, 1) ? 8 : 16);
        const int64_t most = draw(1, 128);
        const bool takes_whole = draw(0, 1);
        const fa_decode_cut cut = fa_cuda_find_decode_cut(&k, most, takes_whole);
        CHECK(cut.length >= 1 && cut.length <= k.tiles &&
                  (k.tiles + cut.length - 1) / cut.length <= most,
              "%d: parts of %lld of %lld tiles, at most %lld", i, (long long)cut.length,
              (long long)k.tiles, (long long)most);
        CHECK(cut.whole >= 0 && cut.whole < k.tasks && (takes_whole || cut.whole == 0), "%d: whole",
              i);
        if (isfinite(cut.us) && k.tasks > SMS)
            CHECK(cut.us <= time_of(&k, 0, k.tiles) + 1e-9, "%d: slower than one part", i);
    }
}

/* Pairs of cuts that were timed on an H200 (us): the first one was faster. */
static void test_timed(void)
{
    static const struct {
        int64_t tasks, tiles;
        int head_dim, rows;
        int64_t whole[2], length[2];
        double us[2];
    } cases[] = {{112, 86, 128, 8, {0, 0}, {86, 43}, {72.6, 82}},
                 {464, 53, 128, 8, {0, 0}, {43, 53}, {181.2, 195.9}},
                 {200, 107, 64, 8, {0, 0}, {86, 107}, {156.7, 189.5}},
                 {192, 59, 128, 8, {0, 0}, {48, 59}, {87.7, 103.5}},
                 {144, 187, 128, 8, {0, 0}, {20, 187}, {198.3, 283.1}},
                 {150, 92, 128, 8, {0, 0}, {27, 92}, {104.8, 153.8}},
                 {24, 33, 128, 8, {0, 0}, {7, 33}, {11.6, 25.8}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fa_decode_keys k =
            make_keys(cases[i].tasks, cases[i].tiles, cases[i].head_dim, cases[i].rows);
        double us[2];
        for (int n = 0; n < 2; n++) us[n] = time_of(&k, cases[i].whole[n], cases[i].length[n]);
        CHECK(us[0] < us[1], "case %d: %g and %g us", (int)i, us[0], us[1]);
        CHECK(fabs(log(us[0] / cases[i].us[0])) < 0.12, "case %d: %g us, measured %g", (int)i,
              us[0], cases[i].us[0]);
    }
}

int main(void)
{
    test_begin();
    test_limits();
    test_choice();
    test_timed();
    return test_end();
}
