/*
 * Split keys if lengths are on the device: which work tiles a section of the line has (split.h). The scheduler warp finds
 * its section's begin together, a sequence for each lane, and then goes from one query tile to the next. All that it
 * computes is warp-uniform, unless it says something else.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SECTIONS_CUH
#define FA_KERNELS_FORWARD_SM90_SECTIONS_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "common/sequence.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"

/* Of 32 sequences, one in each lane. */
typedef struct sequence_lines {
    int first; /* the first of the sequences; below 0: none is known */
    fa_sm90_line line;
    int of_head, end; /* the line's length; where the sequence ends, from the first one's begin on */
} sequence_lines;

typedef struct line_cut {
    int length, section; /* of the line, and of a section */
} line_cut;

/* Where a section is: in which query tile, and behind how much of it. */
typedef struct section {
    int number, left; /* how much of it is left */
    int sequence, head, tile, offset;
    fa_sm90_line line;
    fa_tile rows; /* of the sequence; the rest is set with each work tile */
} section;

/* Sequences of the line: packed ones as in fa_packed_start, because rows of no sequence get zeros. */
FA_DEVICE int count_sequences(const fa_attention_params *p)
{
    return (int)p->batch + (p->cu_seqlens_q ? 2 : 0);
}

/* Sets what all work tiles of a sequence have in common. */
FA_DEVICE void locate_in_line(const fa_attention_params *p, int sequence, fa_tile *t)
{
    if (p->cu_seqlens_q) {
        fa_locate_packed_sequence(p, sequence, t);
    } else {
        t->batch = sequence;
        fa_locate_padded(p, 0, 1, t);
    }
    fa_locate_keys(p, t);
    t->diagonal = p->diagonal_given ? p->diagonal : t->n_k - t->n_q;
}

/* With a window, the last key is what counts: the first one is only known to be near. */
FA_DEVICE fa_sm90_line find_line(const fa_attention_params *p, const fa_sm90_params *s,
                                 const fa_tile *t)
{
    const int hi = find_reach(p, s, t).hi;
    fa_sm90_line line;
    line.tiles = (int)(t->room_q + QUERIES - 1) / QUERIES;
    line.reach = hi >= UNBOUNDED ? UNBOUNDED : hi - 1;
    line.keys = (int)t->n_k;
    const int64_t right = p->causal ? 0 : p->window_right;
    if (p->window_left >= 0 && right >= 0 && p->window_left < line.keys && right < line.keys)
        line.keys = min(line.keys,
                        (int)(p->window_left + right) + QUERIES + FA_SM90_KEY_ALIGNMENT);
    return line;
}

FA_DEVICE int length_of_tiles(const fa_sm90_params *s, const fa_sm90_line *line, int tiles)
{
    return fa_sm90_length_of_tiles(line, QUERIES, s->split.tile_cost, tiles);
}

/* Each lane has the line of a sequence from `first` on. */
FA_DEVICE void load_lines(const fa_attention_params *p, const fa_sm90_params *s, int first,
                          sequence_lines *lines)
{
    const int lane = (int)threadIdx.x % 32;
    if (lines->first == first) return;
    lines->first = first;
    lines->line.tiles = lines->line.reach = lines->line.keys = 0;
    if (first + lane < count_sequences(p)) {
        fa_tile t;
        locate_in_line(p, first + lane, &t);
        lines->line = find_line(p, s, &t);
    }
    lines->of_head = length_of_tiles(s, &lines->line, lines->line.tiles);
    lines->end = lines->of_head * (int)p->heads_q;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int before = __shfl_sync(0xffffffff, lines->end, (lane - apart) & 31);
        if (lane >= apart) lines->end += before;
    }
}

FA_DEVICE line_cut find_sections(const fa_attention_params *p, const fa_sm90_params *s,
                                 sequence_lines *lines)
{
    const int sequences = count_sequences(p);
    int length = 0, most_keys = 0;
    for (int first = 0; first < sequences; first += 32) {
        load_lines(p, s, first, lines);
        length += __shfl_sync(0xffffffff, lines->end, 31);
        most_keys = max(most_keys, lines->line.keys);
    }
    most_keys = (int)__reduce_max_sync(0xffffffff, (uint32_t)most_keys);
    const line_cut cut = {
        length, fa_sm90_section_length(&s->split, length, most_keys, KEYS)};
    return cut;
}

/* Goes to the sequence that has what is x behind the line's begin. Returns how far it is behind the sequence's begin; below
 * 0: there is none, because lengths are wrong. */
FA_DEVICE int find_sequence_of(const fa_attention_params *p, const fa_sm90_params *s, int x,
                               sequence_lines *lines, section *at, int *of_head)
{
    for (int first = 0; first < count_sequences(p); first += 32) {
        load_lines(p, s, first, lines);
        const uint32_t behind = __ballot_sync(0xffffffff, lines->end > x);
        if (behind == 0) {
            x -= __shfl_sync(0xffffffff, lines->end, 31);
            continue;
        }
        const int lane = 32 - __popc(behind); /* ends ascend */
        at->sequence = first + lane;
        at->line.tiles = __shfl_sync(0xffffffff, lines->line.tiles, lane);
        at->line.reach = __shfl_sync(0xffffffff, lines->line.reach, lane);
        at->line.keys = __shfl_sync(0xffffffff, lines->line.keys, lane);
        *of_head = __shfl_sync(0xffffffff, lines->of_head, lane);
        return x - __shfl_sync(0xffffffff, lines->end, lane) + *of_head * (int)p->heads_q;
    }
    return -1;
}

/* The query tile that has what is x behind its head's begin. */
FA_DEVICE int find_tile_of(const fa_sm90_params *s, const fa_sm90_line *line, int x)
{
    int low = 0, high = line->tiles;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (length_of_tiles(s, line, middle) <= x) low = middle;
        else high = middle;
    }
    return low;
}

/* Section n. It has no note until there is one. */
FA_DEVICE section begin_section(const fa_attention_params *p, const fa_sm90_params *s,
                                const line_cut *cut, int n, sequence_lines *lines)
{
    section at;
    const int64_t begin = (int64_t)n * cut->section;
    at.number = n;
    at.left = (int)fa_max64(0, fa_min64(cut->section, cut->length - begin));
    if (threadIdx.x % 32 == 0) s->split.cuts[n].parts = 0;
    if (at.left == 0) return at;
    int of_head;
    const int x = find_sequence_of(p, s, (int)begin, lines, &at, &of_head);
    if (x < 0) {
        at.left = 0;
        return at;
    }
    at.head = (int)((uint32_t)x / (uint32_t)of_head);
    at.tile = find_tile_of(s, &at.line, x - at.head * of_head);
    at.offset = x - at.head * of_head - length_of_tiles(s, &at.line, at.tile);
    locate_in_line(p, at.sequence, &at.rows);
    return at;
}

FA_DEVICE void next_tile_of_line(const fa_attention_params *p, const fa_sm90_params *s, section *at)
{
    at->offset = 0;
    if (++at->tile < at->line.tiles) return;
    at->tile = 0;
    if (++at->head < (int)p->heads_q) return;
    at->head = 0;
    do {
        if (++at->sequence >= count_sequences(p)) { /* only if lengths are wrong */
            at->left = 0;
            return;
        }
        locate_in_line(p, at->sequence, &at->rows);
        at->line = find_line(p, s, &at->rows);
    } while (at->line.tiles == 0);
}

/* How many parts a query tile has, of whose second part the section is. */
FA_DEVICE int count_parts(const fa_sm90_params *s, const line_cut *cut, const section *at,
                          int keys, int key_tiles)
{
    int parts = 2;
    for (int x = at->offset + cut->section;
         fa_sm90_cut_at(&s->split, x, keys, KEYS) < key_tiles && parts < FA_SM90_PARTS; x += cut->section)
        parts++;
    return min(parts, s->split.sections - at->number + 1);
}

/* The note about a query tile whose second part the section has. One lane. */
FA_DEVICE void note_cut(const fa_attention_params *p, const fa_sm90_params *s, const work_tile *w,
                        int section, int parts)
{
    const fa_tile *t = &w->query_tile;
    fa_sm90_cut *cut = &s->split.cuts[section];
    cut->parts = parts;
    cut->block = (int)t->block_q;
    cut->row = (int)(t->start_q + t->first);
    cut->head = (int)t->head;
    cut->rows = w->rows;
    cut->queries = w->queries;
    cut->lse = fa_row_index(p, t, t->first);
}

/* Describes the query tile at which the section is, or a part of it, and goes to the next. False if it has nothing of the
 * query tile, because its part would be short. */
FA_DEVICE bool describe_next_of_section(const fa_attention_params *p, const fa_sm90_params *s,
                                        const line_cut *cut, section *at, work_tile *w)
{
    const int keys = fa_sm90_keys_of_tile(&at->line, QUERIES, at->tile),
              key_tiles = max((keys + KEYS - 1) / KEYS, 1);
    const int length = min(keys + s->split.tile_cost - at->offset, at->left);
    const int from = fa_sm90_cut_at(&s->split, at->offset, keys, KEYS);
    const int to = fa_sm90_cut_at(&s->split, at->offset + length, keys, KEYS);
    const bool found = from < to;
    if (found) {
        fa_tile *t = &w->query_tile;
        *t = at->rows;
        t->head = at->head;
        t->head_kv = fa_divide_by(at->head, s->by_group);
        t->first = at->tile * QUERIES;
        w->rows = (int32_t)fa_min64(t->room_q - t->first, QUERIES);
        find_key_tiles(p, s, w);
        w->out = fa_view_row(&p->out, t->block_q, t->start_q + t->first, t->head);
        w->sums = NULL;
        if (from > 0 || to < key_tiles) {
            const int64_t row = (int64_t)(2 * at->number + (from == 0)) * QUERIES;
            w->out = (char *)(s->split.out + row * VALUE_DIM);
            w->sums = s->split.sums + row;
            if (from > 0 && fa_sm90_cut_at(&s->split, at->offset - cut->section, keys, KEYS) == 0 &&
                threadIdx.x % 32 == 0)
                note_cut(p, s, w, at->number, count_parts(s, cut, at, keys, key_tiles));
            take_part(from, to, w);
        }
        find_tiles_of_consumers(w);
        find_options(p, s, w);
    }
    at->left -= length;
    if (at->left > 0) next_tile_of_line(p, s, at);
    return found;
}

#endif
