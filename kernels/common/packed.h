/*
 * How tiles of packed sequences are numbered: a contract between the host, which launches blocks for all numbers,
 * and the
 * kernels, which find out what a number stands for.
 *
 * The tiles of all sequences are numbered consecutively, without a sum over their lengths. Sequence s, rows
 * [start, end), gets the numbers from start / tile + s on; the next one begins at end / tile + s + 1, which leaves
 * room
 * for its ceil((end - start) / tile) tiles. A number without rows is unused. The rows before the first sequence and
 * after the last one count as two more sequences, 0 and batch + 1, without queries or keys: only zeros are written
 * there.
 */
#ifndef FA_KERNELS_COMMON_PACKED_H
#define FA_KERNELS_COMMON_PACKED_H

/* The number of a sequence's first tile. start: its first row; tile: rows of a tile. */
#define FA_PACKED_FIRST_TILE(start, tile, s) ((start) / (tile) + (s))

/* How many numbers there are for this many rows of `batch` sequences: the last number is that of the last sequence's
 * end. */
#define FA_PACKED_TILES(rows, tile, batch) (FA_PACKED_FIRST_TILE(rows, tile, (batch) + 1) + 1)

#endif
