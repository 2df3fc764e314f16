/*
 * The classes of faults that `flashattn verify` looks for one by one, in addition to random
 * problems from the whole option space. In every problem, outputs, unused memory and workspaces
 * begin as NaN, buffers are between guard bands, and on a GPU a second run must produce the same
 * bits.
 */
#include "args.h"
#include "verify_classes.h"

const verify_class verify_classes[] = {
    {"empty", RANDOM_EMPTY, 150, false, "no queries, no keys, rows that see none"},
    {"unused", RANDOM_UNUSED, 150, false, "NaN in padding, pages, hidden keys"},
    {"grid", RANDOM_GRID, 12, true, "more than 65,535 batch items or heads"},
    {"heads", RANDOM_HEADS, 60, false, "many heads with several tiles"},
    {"lengths", RANDOM_LENGTHS, 200, false, "packed, padded, paged; lengths 0 and 1"},
    {"paged", RANDOM_PAGED, 200, false, "pages of every size, NaN in what is unused"},
    {"strides", RANDOM_STRIDES, 200, false, "broadcast, backwards, gaps, misaligned"},
    {"tails", RANDOM_TAILS, RANDOM_NUM_TAILS, true, "every head dim, every rest of a tile"},
    {"masks", RANDOM_MASKS, 200, false, "causal, diagonal, window; lengths differ"},
    {"split", RANDOM_SPLIT, 100, false, "few queries, many keys, several items"},
    {"invariance", RANDOM_INVARIANCE, 150, false, "an item alone has the same bits"},
    {"dropout", RANDOM_DROPOUT, 60, false, "every bit of the mask"},
    {"wide", RANDOM_WIDE, 100, false, "head dims of 257 to 512"},
    {"chunks", RANDOM_CHUNKS, 150, false, "attention_chunk, causal or not"},
    {"quantized", RANDOM_QUANTIZED, 150, false, "float8 and int8 caches, scales of any shape"},
    {"latent", RANDOM_LATENT, 100, false, "head dims to 576, values in the keys"},
    {"bias", RANDOM_BIAS, 200, false, "a bias and its gradient, which heads or items may share"},
    {"peaked", RANDOM_PEAKED, 130, true, "rows that few keys dominate: as exact as the best"},
};
const int verify_num_classes = CLI_COUNT(verify_classes);

const char *const verify_class_names[] = {
    "all",   "none",    "empty",     "unused", "grid",  "heads",      "lengths",
    "paged", "strides", "tails",     "masks",  "split", "invariance", "dropout",
    "wide",  "chunks",  "quantized", "latent", "bias",  "peaked",     NULL};
_Static_assert(CLI_COUNT(verify_class_names) - 1 - VERIFY_FIRST_CLASS == CLI_COUNT(verify_classes),
               "a name for every class");
