/*
 * Split keys by sections: which work tiles a section of the line has (split.h). The scheduler warp finds
 * its section's begin together, a sequence for each lane, and then goes from one query tile to the next. All that it
 * computes is warp-uniform, unless it says something else.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SECTIONS_CUH
#define FA_KERNELS_FORWARD_SM90_SECTIONS_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/lengths.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"

#if SPLIT

/* A sequence, and its line. In 32 bits, because a block's first load waits for it. */
typedef struct line_sequence {
    sequence_lengths lengths;
    fa_sm90_reach reach;
    fa_sm90_line line;
} line_sequence;

/* Of 32 sequences, one in each lane. */
typedef struct sequence_lines {
    int first; /* the first of the sequences; below 0: none is known */
    line_sequence own;
    int of_head; /* the length of a head */
    int end;     /* where the sequence ends, from the first one's begin on */
} sequence_lines;

typedef struct line_cut {
    int length, section; /* of the line, and of a section */
} line_cut;

/* Where a section is: in which query tile, and behind how much of it. */
typedef struct section {
    int number;                       /* of its note; its slots follow from it */
    int in_step, slice;               /* numbers of its line, and in that line */
    int left;                         /* how much of it is left */
    int sequence, head, tile, offset; /* head: of the line */
    line_sequence of;
} section;

/* A bound by position, if there is one, of a sequence whose diagonal the host does not know. */
FA_DEVICE int shift_bound(int bound, int diagonal)
{
    if (bound >= UNBOUNDED || bound <= -UNBOUNDED) return bound;
    return max(-UNBOUNDED, min(bound + diagonal, UNBOUNDED));
}

/* With a window, the last key is what counts: the first one is only known to be near. */
FA_DEVICE void find_line(const fa_attention_params *p, const fa_sm90_params *s, line_sequence *of)
{
    const sequence_lengths *own = &of->lengths;
    const int unknown = p->diagonal_given ? 0 : own->n_k - own->n_q;
    of->reach.lo = shift_bound(s->reach.lo, unknown);
    of->reach.hi = shift_bound(s->reach.hi, unknown);
    of->line.tiles = count_query_tiles(s, own->room_q);
    of->line.reach = of->reach.hi >= UNBOUNDED ? UNBOUNDED : of->reach.hi - 1;
    of->line.keys = own->n_k;
    if (s->reach.lo > -UNBOUNDED && s->reach.hi < UNBOUNDED)
        of->line.keys = (int)fa_min64(own->n_k, (int64_t)s->reach.hi - s->reach.lo + QUERIES +
                                                    FA_SM90_KEY_ALIGNMENT);
}

FA_DEVICE void find_sequence(const fa_attention_params *p, const fa_sm90_params *s, int sequence,
                             line_sequence *of)
{
    find_rows_and_keys(p, sequence, &of->lengths);
    find_line(p, s, of);
}

FA_DEVICE int length_of_tiles(const fa_sm90_params *s, const fa_sm90_line *line, int tiles)
{
    return fa_sm90_length_of_tiles(line, &s->split.group, s->split.tile_cost, tiles);
}

/* Each lane has a sequence from `first` on. */
FA_DEVICE void load_lines(const fa_attention_params *p, const fa_sm90_params *s, int first,
                          sequence_lines *lines)
{
    const int lane = (int)threadIdx.x % 32, count = count_sequences(p);
    if (lines->first == first) return;
    lines->first = first;
    find_sequence(p, s, min(first + lane, count - 1), &lines->own);
    if (first + lane >= count) lines->own.line.tiles = lines->own.line.keys = 0;
    lines->of_head = length_of_tiles(s, &lines->own.line, lines->own.line.tiles);
    lines->end = add_lanes_in_front(lines->of_head * s->split.line_heads);
}

FA_DEVICE line_cut find_sections(const fa_attention_params *p, const fa_sm90_params *s,
                                 sequence_lines *lines)
{
    const int sequences = count_sequences(p);
    int length = 0, most_keys = 0;
    for (int first = 0; first < sequences; first += 32) {
        load_lines(p, s, first, lines);
        length = add_lengths(length, __shfl_sync(0xffffffff, lines->end, 31));
        most_keys = max(most_keys, lines->own.line.keys);
    }
    if (length == FA_SM90_LINE)
        length = 0; /* nothing is done, so that nothing outside is written */
    most_keys = (int)__reduce_max_sync(0xffffffff, (uint32_t)most_keys);
    const line_cut cut = {length, fa_sm90_section_length(&s->split, length, most_keys, KEYS)};
    return cut;
}

/* A lane's sequence for all lanes. */
FA_DEVICE void take_sequence(const line_sequence *own, int lane, line_sequence *of)
{
    of->lengths.batch = __shfl_sync(0xffffffff, own->lengths.batch, lane);
    of->lengths.start_q = __shfl_sync(0xffffffff, own->lengths.start_q, lane);
    of->lengths.room_q = __shfl_sync(0xffffffff, own->lengths.room_q, lane);
    of->lengths.n_q = __shfl_sync(0xffffffff, own->lengths.n_q, lane);
    of->lengths.start_k = __shfl_sync(0xffffffff, own->lengths.start_k, lane);
    of->lengths.n_k = __shfl_sync(0xffffffff, own->lengths.n_k, lane);
    of->reach.lo = __shfl_sync(0xffffffff, own->reach.lo, lane);
    of->reach.hi = __shfl_sync(0xffffffff, own->reach.hi, lane);
    of->line.tiles = __shfl_sync(0xffffffff, own->line.tiles, lane);
    of->line.reach = __shfl_sync(0xffffffff, own->line.reach, lane);
    of->line.keys = __shfl_sync(0xffffffff, own->line.keys, lane);
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
        take_sequence(&lines->own, lane, &at->of);
        *of_head = __shfl_sync(0xffffffff, lines->of_head, lane);
        return x - __shfl_sync(0xffffffff, lines->end, lane) + *of_head * s->split.line_heads;
    }
    return -1;
}

/* The query tile that has what is x behind its head's begin: lanes try different ones. */
FA_DEVICE int find_tile_of(const fa_sm90_params *s, const fa_sm90_line *line, int x)
{
    const int lane = (int)threadIdx.x % 32;
    int tile = 0;
    for (int count = line->tiles; count > 1;) {
        const int step = (count + 31) / 32, tried = (lane + 1) * step;
        const bool before = tried < count && length_of_tiles(s, line, tile + tried) <= x;
        tile += __popc(__ballot_sync(0xffffffff, before)) * step;
        count = min(step, line->tiles - tile);
    }
    return tile;
}

/* The n-th block's section. It has no note until there is one. */
FA_DEVICE section begin_section(const fa_attention_params *p, const fa_sm90_params *s,
                                const line_cut *cut, int n, sequence_lines *lines)
{
    section at;
    const int slice = (int)fa_divide_by(n, s->split.by_step);
    const int64_t begin = (int64_t)slice * cut->section;
    at.in_step = n - slice * s->split.in_step;
    at.slice = slice;
    at.number = at.in_step * s->split.slices + slice;
    at.left = (int)fa_max64(0, fa_min64(cut->section, cut->length - begin));
    if (threadIdx.x % 32 == 0) s->split.cuts[at.number].parts = 0;
    if (at.left == 0) return at;
    int of_head;
    const int x = find_sequence_of(p, s, (int)begin, lines, &at, &of_head);
    if (x < 0) {
        at.left = 0;
        return at;
    }
    at.head = s->split.line_heads > 1 ? (int)((uint32_t)x / (uint32_t)of_head) : 0;
    at.tile = find_tile_of(s, &at.of.line, x - at.head * of_head);
    at.offset = x - at.head * of_head - length_of_tiles(s, &at.of.line, at.tile);
    return at;
}

FA_DEVICE void next_tile_of_line(const fa_attention_params *p, const fa_sm90_params *s, section *at)
{
    at->offset = 0;
    if (++at->tile < at->of.line.tiles) return;
    at->tile = 0;
    if (++at->head < s->split.line_heads) return;
    at->head = 0;
    do {
        if (++at->sequence >= count_sequences(p)) { /* only if lengths are wrong */
            at->left = 0;
            return;
        }
        find_sequence(p, s, at->sequence, &at->of);
    } while (at->of.line.tiles == 0);
}

/* What the section has of the query tile at which it is: key tiles [from, to) of key_tiles; and how much of the line that is. */
typedef struct section_part {
    int keys, key_tiles, from, to, length;
} section_part;

FA_DEVICE section_part find_part_of_section(const fa_sm90_params *s, const section *at)
{
    section_part part;
    part.keys = fa_sm90_keys_of_tile(&at->of.line, s->split.group.tile_queries, at->tile);
    part.key_tiles = max((part.keys + KEYS - 1) / KEYS, 1);
    part.length = min(part.keys + s->split.tile_cost - at->offset, at->left);
    part.from = fa_sm90_cut_at(&s->split, at->offset, part.keys, KEYS);
    part.to = fa_sm90_cut_at(&s->split, at->offset + part.length, part.keys, KEYS);
    return part;
}

FA_DEVICE bool is_cut(const section_part *part)
{
    return part->from > 0 || part->to < part->key_tiles;
}

/* The note about a query tile of which the section has a later part: number `later` of `parts`, counted from 0. One lane. */
FA_DEVICE void note_cut(const fa_attention_params *p, const fa_sm90_params *s, const line_cut *cut,
                        const section *at, const section_part *part, const work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    fa_sm90_cut *note = &s->split.cuts[at->number];
    const fa_sm90_cuts cuts =
        fa_sm90_count_cuts(&s->split, at->offset, part->keys, cut->section, KEYS);
    /* There are no other slots, if lengths are wrong. */
    const int later = min(cuts.before + 1, at->slice);
    const int parts = later + 1 + min(cuts.behind, s->split.slices - 1 - at->slice);
    note->parts = parts;
    note->second = at->number - later + 1;
    note->first = w->rows * (later - 1) / (parts - 1);
    note->end = w->rows * later / (parts - 1);
    note->block = (int)t->block_q;
    note->row = (int)(t->start_q + t->first);
    note->head = (int)t->head;
    note->queries = w->queries;
    note->lse = fa_row_index(p, t, t->first);
}

/* The first part of a description: which queries and keys. */
FA_DEVICE void find_keys_of_part(const fa_attention_params *p, const fa_sm90_params *s,
                                 const section *at, const section_part *part, work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    w->query_tile =
        make_tile(p, s, &at->of.lengths, at->head * s->split.in_step + at->in_step, at->tile);
    w->box = s->split.group.box;
    w->rows = rows_of(w, (int)(t->room_q - t->first));
    find_key_tiles(at->of.reach, w);
    if (is_cut(part)) take_part(part->from, part->to < part->key_tiles ? part->to : INT32_MAX, w);
}

/* The rest. */
FA_DEVICE void describe_part(const fa_attention_params *p, const fa_sm90_params *s,
                             const line_cut *cut, const section *at, const section_part *part,
                             work_tile *w)
{
    const fa_tile *t = &w->query_tile;
    w->sums = NULL;
    if (is_cut(part)) {
        const int64_t row = (int64_t)(2 * at->number + (part->from == 0)) * QUERIES;
        w->out = (char *)(s->split.out + row * VALUE_DIM);
        w->sums = s->split.sums + row;
        if (part->from > 0 && threadIdx.x % 32 == 0) note_cut(p, s, cut, at, part, w);
    } else w->out = fa_view_row(&p->out, t->block_q, t->start_q + t->first, t->head);
    find_tiles_of_consumers(w);
    find_options(p, s, w);
}

/* Goes to the next query tile, if the section has something of it. */
FA_DEVICE void end_part(const fa_attention_params *p, const fa_sm90_params *s,
                        const section_part *part, section *at)
{
    at->left -= part->length;
    if (at->left > 0) next_tile_of_line(p, s, at);
}

#endif

#endif
