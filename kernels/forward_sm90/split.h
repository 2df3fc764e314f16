/*
 * Split keys: tasks of forward_sm90_split, and where their sums are in the workspace. Shared by the kernels and the
 * planner.
 *
 * The key tiles that a query tile sees are cut into parts of `part_tiles` tiles; the last part has fewer. A task is a
 * part of a query tile of a head. Tasks are numbered part by part, so that most of the first ones have whole parts.
 * Among the tasks of a part the last query tile comes first, because it sees the most keys under a causal mask, and all
 * heads of a query tile follow each other:
 *
 *     task = first_task[part] + (tiles - 1 - tile) * heads + head
 *
 * Under a causal mask, query tiles before first_tile[part] do not have the part, and there is no task for it. Some
 * tasks may be superfluous, because a window hides their keys.
 *
 * Task n leaves the sums of its rows, before they are divided, in slot n of the workspace.
 *
 * If lengths are on the device, only the device knows how many key tiles a query tile sees. Then, and if heads share query
 * tiles, all work lies on a line: sequence after sequence, head after head, and query tile after query tile. A query tile is
 * as long as the keys that it sees, and `tile_cost` more. The line is cut into sections of equal length, and a task is a section:
 *
 *     line           |  tile 0  |    tile 1    |      tile 2      |        tile 3        |  tile 0  | ...
 *     sections       |       section 0       |       section 1       |       section 2       | ...
 *     parts           whole       first         later   first          later                  whole
 *
 * Some heads have lines of their own, which are cut alike, so that blocks read the same keys of these heads at the same time:
 * block n has section n / in_step of the line of every in_step-th head from n % in_step on. Sections of a line have
 * consecutive numbers.
 *
 * A query tile inside a section is whole: its rows are finished as without split keys. Others have parts in several
 * sections, whose sums go to the workspace. Section n has two slots: 2 n + 1 for the first part of the query tile in which
 * it ends, and 2 n for a later part of the one in which it begins. The scheduler of a section that has a later part leaves
 * a note about it (fa_sm90_cut), by which the second launch finds rows to merge: a variant of its own (own_lengths in
 * variants.h). The sections with later parts of a query tile have equal shares of its rows there.
 *
 * With many short sequences, tasks may be query tiles with all keys, if heads share them: their numbers are those of
 * fa_find_tile, with groups in place of heads. There is no second launch.
 *
 * With sections or whole query tiles, a query tile may have the rows of several query heads that share a key head, one after the
 * other for each query (FlashAttention-3 calls this PackGQA). Each consumer has as many whole queries of such a group as its
 * FA_SM90_BOX_ROWS rows have room for: row r of a consumer is query r / group of them, and head r % group of the group. The last
 * rows of a consumer may be left over (with 5 heads four of them); nothing is stored of those. Then the heads of the line are
 * these groups.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SPLIT_H
#define FA_KERNELS_FORWARD_SM90_SPLIT_H

#include <stdbool.h>
#include <stdint.h>

#include "../common/divide.h"

enum {
    FA_SM90_BOX_ROWS = 64,       /* of a consumer */
    FA_SM90_PARTS = 16,          /* of a query tile, at most; */
    FA_SM90_SECTION_PARTS = 64,  /* with sections */
    FA_SM90_MERGE_THREADS = 128, /* of a block of forward_sm90_merge */
    FA_SM90_MERGE_COLUMNS = 8,   /* of such a thread */
    FA_SM90_MERGE_BLOCKS = 5,    /* of a multiprocessor, with sections; */
    FA_SM90_MERGE_SHARES = 8     /* of a section's rows: so many blocks merge them */
};

/* Rows of a query tile that a block of forward_sm90_merge has at a time if there are sections. */
#define FA_SM90_MERGE_ROWS(value_dim)                                                              \
    (FA_SM90_MERGE_THREADS / (((value_dim) + FA_SM90_MERGE_COLUMNS - 1) / FA_SM90_MERGE_COLUMNS))

/* The rows of a consumer, if query heads share query tiles: how many heads, how many queries of each, and a factor: row r is query
 * r * factor / 2^12, which is exact for so few rows. In one number, because the scheduler reads them often from shared memory. */
typedef uint32_t fa_sm90_box;

FA_SHARED_FUNCTION fa_sm90_box fa_sm90_box_of(int32_t heads)
{
    const uint32_t n = (uint32_t)heads, factor = ((1u << 12) + n - 1) / n;
    return factor << 16 | (FA_SM90_BOX_ROWS / n) << 8 | n;
}

FA_SHARED_FUNCTION int32_t fa_sm90_box_heads(fa_sm90_box box) { return (int32_t)(box & 255); }
FA_SHARED_FUNCTION int32_t fa_sm90_box_queries(fa_sm90_box box)
{
    return (int32_t)(box >> 8 & 255);
}

FA_SHARED_FUNCTION int32_t fa_sm90_query_in_box(fa_sm90_box box, int32_t row)
{
    return row * (int32_t)(box >> 16) >> 12;
}

/* Query heads that share query tiles. One head: as many queries as rows. */
typedef struct fa_sm90_group {
    int32_t heads, tile_queries; /* queries of a query tile */
    fa_sm90_box box;
    fa_reciprocal by_heads, by_tile_queries;
} fa_sm90_group;

/* heads: up to FA_SM90_BOX_ROWS. */
FA_SHARED_FUNCTION fa_sm90_group fa_sm90_group_of(int32_t heads, int32_t consumers)
{
    fa_sm90_group g;
    g.heads = heads;
    g.box = fa_sm90_box_of(heads);
    g.tile_queries = consumers * fa_sm90_box_queries(g.box);
    g.by_heads = fa_reciprocal_of(heads);
    g.by_tile_queries = fa_reciprocal_of(g.tile_queries);
    return g;
}

/* A row's base, an exponent of 2, and the sum of its weights 2^(x - base). */
typedef struct fa_sm90_row_sum {
#ifdef __cplusplus
    alignas(8)
#else
    _Alignas(8)
#endif
        float base;
    float sum;
} fa_sm90_row_sum;

/* With sections: a query tile that several sections share, of which the section has a later part. */
typedef struct fa_sm90_cut {
    int32_t parts;            /* 0: the section has no later part */
    int32_t second;           /* the section that has the second one */
    int32_t first, end;       /* rows of the tile that are merged for this section */
    int32_t block, row, head; /* of the tile's first row in the outputs */
    int32_t queries;          /* of the tile's rows; those from the last one on get zeros */
    int64_t lse;              /* its first row's place there */
} fa_sm90_cut;

typedef struct fa_sm90_split {
    float *out;                 /* of each slot: rows of a query tile, value_dim columns */
    fa_sm90_row_sum *sums;      /* of each slot: of its rows */
    int32_t part_tiles, parts;  /* of a part; of a query tile, at most; 0: query tiles are whole */
    int32_t heads, tiles;       /* of all batch items; query tiles of a head */
    int32_t queries, value_dim; /* of a query tile; columns of a slot */
    int32_t first_tile[FA_SM90_PARTS],
        first_task[FA_SM90_PARTS + 1]; /* the last one: the number of tasks */
    fa_sm90_group group;
    /* 0: there is no line. Otherwise these, `queries`, `value_dim` and `group` are all that is used; of whole tiles `group`. */
    int32_t sections, tile_cost; /* the cost in keys */
    int32_t in_step, line_heads,
        slices; /* lines; heads of a line, or groups of them; sections of a line */
    fa_reciprocal by_step, by_slices; /* a block's first load waits for divisions */
    int32_t least;                    /* key tiles of a section; of a part half of it, rounded up */
    fa_sm90_cut *cuts;                /* of each section */
} fa_sm90_split;

typedef struct fa_sm90_part {
    int32_t number, tile, head;
} fa_sm90_part;

/* The task's part, query tile and head. */
FA_SHARED_FUNCTION fa_sm90_part fa_sm90_find_part(const fa_sm90_split *split, int32_t task)
{
    fa_sm90_part found = {0, 0, 0};
    while (found.number + 1 < split->parts && task >= split->first_task[found.number + 1])
        found.number++;
    const uint32_t i = (uint32_t)(task - split->first_task[found.number]),
                   heads = (uint32_t)split->heads;
    found.tile = split->tiles - 1 - (int32_t)(i / heads);
    found.head = (int32_t)(i % heads);
    return found;
}

/* The number of parts of a query tile: these are the first ones. */
FA_SHARED_FUNCTION int32_t fa_sm90_count_parts(const fa_sm90_split *split, int32_t tile)
{
    int32_t parts = 1;
    while (parts < split->parts && tile >= split->first_tile[parts]) parts++;
    return parts;
}

/* The opposite of fa_sm90_find_part. */
FA_SHARED_FUNCTION int32_t fa_sm90_task_of(const fa_sm90_split *split, int32_t part, int32_t tile,
                                           int32_t head)
{
    return split->first_task[part] + (split->tiles - 1 - tile) * split->heads + head;
}

/* ---- Sections -------------------------------------------------------------------------------- */

enum { FA_SM90_LINE = 1 << 30 /* the line is shorter */ };

/* The query tiles of a head. Tile t sees reach + (t + 1) * queries keys, but at least 0 and at most `keys`. */
typedef struct fa_sm90_line {
    int32_t tiles, reach, keys;
} fa_sm90_line;

FA_SHARED_FUNCTION int32_t fa_sm90_clamp(int32_t x, int32_t most)
{
    return x < 0 ? 0 : x < most ? x : most;
}

FA_SHARED_FUNCTION int32_t fa_sm90_keys_of_tile(const fa_sm90_line *line, int32_t queries,
                                                int32_t tile)
{
    return fa_sm90_clamp(line->reach + (tile + 1) * queries, line->keys);
}

/* Of the first tiles so many have no more than so many keys within reach of their last query. */
FA_SHARED_FUNCTION int32_t fa_sm90_tiles_within(int32_t keys, const fa_sm90_group *group,
                                                int32_t tiles)
{
    return fa_sm90_clamp(
        (int32_t)fa_divide_by(fa_sm90_clamp(keys, FA_SM90_LINE), group->by_tile_queries), tiles);
}

/* The length of the first tiles. Those up to `none` see no key, those up to `some` all that they reach. */
FA_SHARED_FUNCTION int32_t fa_sm90_length_of_tiles(const fa_sm90_line *line,
                                                   const fa_sm90_group *group, int32_t cost,
                                                   int32_t tiles)
{
    const int32_t none = fa_sm90_tiles_within(-line->reach, group, tiles);
    const int32_t some = fa_sm90_tiles_within(line->keys - line->reach, group, tiles);
    const int32_t reach = some > none ? line->reach : 0;
    const int32_t pairs = (some * (some + 1) - none * (none + 1)) / 2 * group->tile_queries;
    return tiles * cost + (some - none) * reach + pairs + (tiles - some) * line->keys;
}

/* The length of sections: so that there are no more of them, that a tile with the most keys has at most
 * FA_SM90_SECTION_PARTS parts, and that they are not shorter than they may be. tile_keys: of a key tile. */
FA_SHARED_FUNCTION int32_t fa_sm90_section_length(const fa_sm90_split *split, int32_t length,
                                                  int32_t most_keys, int32_t tile_keys)
{
    const int32_t each = (int32_t)fa_divide_by(length + split->slices - 1, split->by_slices),
                  least = split->least * tile_keys,
                  longest = most_keys / (FA_SM90_SECTION_PARTS - 3) + 1,
                  more = least > longest ? least : longest;
    return each > more ? each : more;
}

/* The key tile before which a query tile with so many keys is cut, if the line is cut x behind the tile's begin: 0, or their
 * number, if one of the parts would be short. */
FA_SHARED_FUNCTION int32_t fa_sm90_cut_at(const fa_sm90_split *split, int32_t x, int32_t keys,
                                          int32_t tile_keys)
{
    const int32_t tiles = keys > 0 ? (keys + tile_keys - 1) / tile_keys : 1, tile = x / tile_keys,
                  part = (split->least + 1) / 2;
    if (x <= 0) return 0;
    if (x >= keys || tile > tiles - part) return tiles;
    return tile < part ? 0 : tile;
}

/* A query tile that is cut x behind its begin, between two parts, and after every `section` before and behind that. */
typedef struct fa_sm90_cuts {
    int32_t before, behind; /* other cuts inside */
} fa_sm90_cuts;

/* Where fa_sm90_cut_at is more than 0 and less than all key tiles. */
FA_SHARED_FUNCTION fa_sm90_cuts fa_sm90_count_cuts(const fa_sm90_split *split, int32_t x,
                                                   int32_t keys, int32_t section, int32_t tile_keys)
{
    const int32_t part = (split->least + 1) / 2, last = (keys + tile_keys - 1) / tile_keys - part,
                  begin = part * tile_keys, all = (last + 1) * tile_keys,
                  end = all < keys ? all : keys;
    const fa_sm90_cuts cuts = {(int32_t)((uint32_t)(x - begin) / (uint32_t)section),
                               (int32_t)((uint32_t)(end - 1 - x) / (uint32_t)section)};
    return cuts;
}

#endif
