/*
 * The splitters: warps that split tiles of keys and values in place (parts.cuh).
 *
 * A tile's power of two is guessed from the previous tile of keys, or of values, of the same work
 * tile. If it came from another work tile, a row's bits would depend on what else the block has
 * done. While the tile is split, its range is found: the largest and the smallest of its rows, by
 * their largest elements. If they do not fit, the tile is loaded and split again, by a power that
 * fits it. That is rare. If a tile comes in chunks, the splitters treat each chunk as a tile: its
 * power is guessed from the previous chunk of the same columns.
 *
 * A row that is much smaller than another row of the tile would lose bits with any power. If there
 * is one, the tile's unit is set to NaN, so all results become NaN, and rows with NaN are
 * recomputed in float32.
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_SPLIT_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_SPLIT_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "forward_f16x3_sm90/parts.cuh"
#include "forward_f16x3_sm90/pipeline.cuh"
#include "forward_f16x3_sm90/producer.cuh"
#include "common/device.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* The range for the largest element of each row. In this range, elements have errors of at most
 * 2^-23 of their row's largest. */
#define LARGEST_ROW 0x1p15f
#define SMALLEST_ROW 0x1p-2f

/* The first guess: for numbers like those of a standard normal distribution. */
#define FIRST_SCALE 0x1p9f

/* The next tile may be 2^4 times as large as this one, or have rows that are 2^12 times smaller. */
#define SCALE_OF_NEXT 0x1p-4f

/* The steps of a tile, 4 rows each. A splitter does every SPLITTERS-th of them. */
enum { STEPS = KEYS / 4 };

/* A tile for a splitter. Keys outside [from, to) are set to 0, because no query may see them and
 * they may hold NaN. */
typedef struct raw_tile {
    uint32_t address;
    int from, to;
    int first; /* its first step */
} raw_tile;

/* The address of the lane's row in a step. lane: what split_source or split_target returns for the
 * first 8 rows. */
FA_DEVICE uint32_t address_of_step(const raw_tile *tile, int step, uint32_t lane)
{
    return tile->address + (uint32_t)(step / 2 * 1024) + (step % 2 ? lane ^ STEP_1 : lane);
}

/* The lane's floats of a step and a pair of blocks. */
FA_DEVICE eight load_part(const raw_tile *tile, int step, int pair, bool clears)
{
    eight x = load_eight(address_of_step(tile, step, split_source(K_BLOCK)) + 2 * pair * K_BLOCK);
    if (clears) {
        const int row = step / 2 * 8 + (split_row() ^ (step % 2 ? ROW_OF_STEP_1 : 0));
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (row < tile->from || row >= tile->to) x.x[i] = 0;
    }
    return x;
}

/* The largest and the smallest number among the largest elements of a tile's rows. Rows of zeros
 * are ignored. */
typedef struct row_range {
    float largest, smallest;
} row_range;

/* Adds the rows of a step. largest: the largest of the lane's elements of its row. */
FA_DEVICE void add_rows(row_range *range, float largest)
{
    const float row = largest_of_row(largest);
    range->largest = fmaxf(range->largest, row);
    if (row > 0.0f) range->smallest = fminf(range->smallest, row);
}

/* Splits the splitter's rows, and returns their range. */
FA_DEVICE row_range split_rows(const raw_tile *tile, float scale, bool clears)
{
    row_range range = {0, INFINITY};
#pragma unroll 1
    for (int step = tile->first; step < STEPS; step += SPLITTERS) {
        const uint32_t to = address_of_step(tile, step, split_target());
        float largest = 0;
#pragma unroll
        for (int pair = 0; pair < CHUNK_PAIRS; pair += 2) {
            const int second = pair + 1 < CHUNK_PAIRS ? pair + 1 : pair;
            eight x[2];
            x[0] = load_part(tile, step, pair, clears);
            if (second > pair) x[1] = load_part(tile, step, second, clears);
            __syncwarp(); /* all floats have been read into registers */
            largest = largest_of(&x[0], largest);
            store_parts(to + 2 * pair * K_BLOCK, K_BLOCK, &x[0], scale);
            if (second == pair) continue;
            largest = largest_of(&x[1], largest);
            store_parts(to + 2 * second * K_BLOCK, K_BLOCK, &x[1], scale);
        }
        add_rows(&range, largest);
    }
    return range;
}

/* The range of the splitter's rows, ignoring elements that are not finite. */
FA_DEVICE row_range find_range(const raw_tile *tile)
{
    row_range range = {0, INFINITY};
#pragma unroll 1
    for (int step = tile->first; step < STEPS; step += SPLITTERS) {
        float largest = 0;
#pragma unroll 1
        for (int pair = 0; pair < CHUNK_PAIRS; pair++) {
            const eight x = load_part(tile, step, pair, true);
            largest = largest_finite(&x, largest);
        }
        add_rows(&range, largest);
    }
    return range;
}

/* The state that a splitter keeps from tile to tile. */
typedef struct splitter {
    int number;
    uint32_t exchanges, reloads; /* counts so far */
    /* Of the next chunks: those of keys and those of values alternate. */
    float scales[2 * CHUNKS];
} splitter;

/* The range of all splitters' rows. All of them have called it when it returns. */
FA_DEVICE row_range exchange_range(shared_state *state, splitter *x, row_range mine)
{
    const uint32_t largest = __reduce_max_sync(0xffffffff, __float_as_uint(mine.largest)),
                   smallest = __reduce_min_sync(0xffffffff, __float_as_uint(mine.smallest));
    splitter_range *of = state->ranges[x->exchanges++ % 2];
    if (threadIdx.x % 32 == 0) {
        of[x->number].largest = largest;
        of[x->number].smallest = smallest;
    }
    ptx_named_barrier_sync(NAMED_BARRIER_SPLITTERS, SPLITTERS * 32);
    row_range all = {0, INFINITY};
#pragma unroll
    for (int i = 0; i < SPLITTERS; i++) {
        all.largest = fmaxf(all.largest, __uint_as_float(of[i].largest));
        all.smallest = fminf(all.smallest, __uint_as_float(of[i].smallest));
    }
    return all;
}

FA_DEVICE bool fits(row_range range, float scale)
{
    return range.largest * scale <= LARGEST_ROW && range.smallest * scale >= SMALLEST_ROW;
}

/* Where a tile is loaded from when it is loaded again. */
typedef struct origin {
    const fa_attention_params *p;
    const fa_sm90_params *s;
    const work_tile *w;
    bool values;
    int key; /* counted from the work tile's first key */
    int chunk;
} origin;

/* Loads a tile again, and splits it by its own largest element. Returns its range. */
FA_DEVICE row_range split_again(const pipeline *pipe, const raw_tile *tile, const origin *o,
                                int stage, splitter *x, float *scale)
{
    uint64_t *loaded = &pipe->state->again;
    if (x->number == 0) {
        const fa_tile *t = &o->w->query_tile;
        const fa_sm90_map *map = o->values ? &o->s->v : &o->s->k;
        const fa_sm90_steps *step = o->values ? &o->s->v_step : &o->s->k_step;
        const source from = find_source(map, step, t);
        const int key = o->w->first_key + o->key;
        const lane_rows own = find_tile_rows(o->p, o->s, t, key);
        issue_chunk(pipe->tiles + stage * CHUNK, o->p, &from, t, key, o->chunk, &own, loaded);
    }
    __syncwarp();
    ptx_mbarrier_wait(loaded, (int)(x->reloads++ & 1));
    const row_range range = exchange_range(pipe->state, x, find_range(tile));
    *scale = scale_of(__float_as_uint(range.largest));
    split_rows(tile, *scale, true);
    return range;
}

/* Makes the warp's stores visible to products. Executed by the whole warp. */
FA_DEVICE void fill_stage(uint64_t *full)
{
    ptx_fence_proxy_async();
    __syncwarp();
    ptx_mbarrier_arrive_if(full, threadIdx.x % 32 == 0);
}

/* Waits until a tile has been loaded, and splits it. from, to: the keys that some query of the
 * sequence may see. */
FA_DEVICE void split_tile(const pipeline *pipe, const origin *o, int from, int to,
                          tile_count number, splitter *x)
{
    const int stage = stage_of(number);
    shared_state *state = pipe->state;
    __syncwarp();
    ptx_mbarrier_wait(&state->loaded[stage], parity_of(number));
    const raw_tile tile = {ptx_shared_address(pipe->tiles) + stage * CHUNK, from, to,
                           (int)((number + (uint32_t)x->number) % SPLITTERS)};
    float scale = x->scales[0], next = scale;
    row_range range =
        from > 0 || to < KEYS ? split_rows(&tile, scale, true) : split_rows(&tile, scale, false);
    ptx_fence_proxy_async(); /* TMA may write there again */
    range = exchange_range(state, x, range);
    if (!fits(range, scale)) range = split_again(pipe, &tile, o, stage, x, &scale);
    if (range.largest > 0.0f) next = scale_of(__float_as_uint(range.largest)) * SCALE_OF_NEXT;
#pragma unroll
    for (int i = 1; i < 2 * CHUNKS; i++) x->scales[i - 1] = x->scales[i];
    x->scales[2 * CHUNKS - 1] = next;
    if (x->number == 0 && threadIdx.x % 32 == 0)
        state->unit[stage] = fits(range, scale) ? unit_of(scale) : NAN;
    fill_stage(&state->full[stage]);
}

FA_DEVICE void split_all(const pipeline *pipe, const fa_attention_params *p,
                         const fa_sm90_params *s, int number_of_splitter)
{
    splitter x = {.number = number_of_splitter};
    tile_count count = 0;
    int number = 0;
    const work_tile *w = acquire_work_tile(pipe, 0);
    for (int tiles; (tiles = w->key_tiles); w = acquire_work_tile(pipe, ++number)) {
        const fa_range seen = find_seen_keys(p, &w->query_tile);
        const int from = saturate(seen.lo - w->first_key), to = saturate(seen.hi - w->first_key);
#pragma unroll
        for (int i = 0; i < 2 * CHUNKS; i++) x.scales[i] = FIRST_SCALE;
#pragma unroll 1
        for (int i = 0; i < 2 * CHUNKS * tiles; i++) {
            const int key = i / (2 * CHUNKS) * KEYS;
            const origin o = {p, s, w, i / CHUNKS % 2 == 1, key, i % CHUNKS};
            split_tile(pipe, &o, from - key, to - key, count++, &x);
        }
        release_work_tile(pipe, number);
    }
}

#endif
