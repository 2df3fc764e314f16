/*
 * A random problem from the whole option space: drawn from one number, computed by the library,
 * compared with the reference. Memory that must not be read is NaN, memory that must not be written
 * is checked, and outputs begin as NaN.
 */
#ifndef REF_RANDOM_PROBLEM_H
#define REF_RANDOM_PROBLEM_H

#include "buffers.h"
#include "check.h"

typedef enum random_pass {
    RANDOM_FORWARD = 0,
    RANDOM_BACKWARD,
    RANDOM_DECODE,
    RANDOM_WEIGHTS,
    RANDOM_COMBINE,
    RANDOM_NUM_PASSES
} random_pass;

const char *random_pass_name(random_pass pass);

/* What problems are drawn: anything, or those in which one class of faults shows. */
typedef enum random_focus {
    RANDOM_ANYTHING = 0,
    RANDOM_EMPTY,      /* sequences without queries or keys, queries that see no key              */
    RANDOM_UNUSED,     /* padding, pages, hidden keys: memory that must not be read               */
    RANDOM_GRID,       /* more batch items or heads than a grid's 65,535                          */
    RANDOM_LENGTHS,    /* packed, padded, paged; of length 0 and 1; rows behind the last one      */
    RANDOM_PAGED,      /* keys and values in pages of every size, queries packed or not           */
    RANDOM_STRIDES,    /* any order and gaps, broadcast, backwards, misaligned                    */
    RANDOM_TAILS,      /* number by number every head dim to 256, then every residue of the tiles */
    RANDOM_MASKS,      /* causal, diagonals, windows between lengths that differ                  */
    RANDOM_SPLIT,      /* few queries, many keys, more than one batch item                        */
    RANDOM_INVARIANCE, /* FA_BATCH_INVARIANT: each item alone has the same bits                   */
    RANDOM_DROPOUT,    /* values from which every bit of the dropout mask can be read             */
    RANDOM_WIDE,       /* head dims of 257 to 512, without options that change scores             */
    RANDOM_BIAS,       /* a bias and its gradient, which heads or batch items may share           */
    RANDOM_CHUNKS,     /* chunked attention, mostly causal */
    RANDOM_QUANTIZED,  /* float8 and int8 keys and values, with scales of every shape */
    RANDOM_LATENT, /* head dims of 513 to 576 over values that mostly are columns of the keys  */
    RANDOM_PEAKED  /* rows that few keys dominate, by number: as exact as the best kernels    */
} random_focus;

/* What the scores of RANDOM_PEAKED are like. Problem n has kind n % RANDOM_NUM_PEAKS, so that the numbers,
 * having no common divisor with those of head dims, options and types, go through all that there are. */
typedef enum random_peak {
    PEAK_4 = 0,   /* queries are 4 times as large as usual */
    PEAK_16,      /* 16 times */
    PEAK_64,      /* 64 times */
    PEAK_SPIKE,   /* each query has the direction of one key */
    PEAK_2,       /* 2 times */
    PEAK_NONE,    /* standard normal scores: flat rows */
    PEAK_LATE,    /* flat in the first half of the keys, peaked behind */
    PEAK_GROWN,   /* flat but for one key of the second half, which dominates */
    PEAK_IMMENSE, /* the same, by 2^80 to 2^180 */
    PEAK_FIRST,   /* the first key dominates all, as an attention sink does */
    PEAK_SECOND,  /* the first key does, and a little more so one of the second half */
    PEAK_EQUAL,   /* all scores are 0 */
    PEAK_FEW,     /* one query of 8 is 6 times as large as the others */
    RANDOM_NUM_PEAKS
} random_peak;

/* The problems of RANDOM_TAILS that differ. */
enum { RANDOM_NUM_TAILS = 256 + 64 + 80 + 96 + 128 + 176 + 192 };

/* A call of the library. Every pointer leads into one of the buffers, but for the tensors' own structs
 * and the two arrays of fa_combine. */
typedef struct random_call {
    random_pass pass;
    bool decode;
    int run; /* of random_settings' runs, from 0 */
    const ref_buffers *buffers;
    fa_tensor q, k, v, out;
    float *lse;
    fa_options options;
    fa_gradients gradients; /* RANDOM_BACKWARD */
    fa_tensor weights;      /* RANDOM_WEIGHTS */
    const int64_t *rows;
    int64_t num_rows, num_parts; /* RANDOM_COMBINE: parts and their log-sum-exps */
    const fa_tensor *parts;
    const float *const *part_lse;
} random_call;

/* Makes the call. */
fa_status random_call_run(const random_call *call);

enum { RANDOM_WRONG = -1 };

/* Makes a call instead of the library, for example in other memory. If it fails, message (of that
 * size) says why; if a result is wrong, it says how, and the status is RANDOM_WRONG. */
typedef fa_status random_attend(void *context, const random_call *call, char *message, size_t size);

typedef struct random_settings {
    fa_device device;
    int32_t threads; /* 0: each problem draws 1 to 3 */
    bool tiles;      /* what kernels with tensor cores branch on: 16 bits, their head dims, many
                      * tiles. Takes the reference some ten times as long */
    random_focus focus;
    bool wide_heads;        /* head dims of 257 to 512 in most problems of the other classes, too */
    bool few_queries;       /* RANDOM_PEAKED: for kernels that are interpreted */
    bool small;             /* a fourth of the work, likewise */
    const char *focus_name; /* what the command calls it; NULL: RANDOM_ANYTHING */
    bool one_pass;          /* only problems of this pass */
    random_pass pass;
    bool
        backward_alone; /* the forward in front of a backward is not compared: attend's is known to be right */
    int runs;          /* of a backward, each compared, from the same memory; 0: one */
    bool plain_scores; /* no ALiBi, bias, mask or dropout */
    bool unseen_keys;  /* a causal mask in each problem that hides the later half of the keys */
    bool one_dtype;    /* all tensors of this type */
    fa_dtype dtype;
    fa_precision precision; /* of all problems */
    /* Computes forward and decode, and with all_passes the others too; without, there are no problems
     * of them. NULL: the library does. */
    bool all_passes;
    random_attend *attend;
    void *context;
    /* Whether the problem's call is one to make, NULL: each. Asked before arrays have their contents, which takes
     * long: only shapes, lengths and options are there. If not, the status is FA_ERROR_UNSUPPORTED. Of a
     * backward the call is that of the gradients. */
    bool (*wants)(void *context, const random_call *call);
} random_settings;

typedef struct random_result {
    random_pass pass;
    fa_dtype dtype;   /* of q (combine: of the parts) */
    fa_status status; /* of the call that failed, else FA_OK */
    ref_report report;
    char description[800]; /* one line */
    char reproduce[176];   /* a command line */
} random_result;

/* Draws problem number `number` and checks it. May run in several threads at once. */
void random_problem_run(uint64_t number, const random_settings *settings, random_result *result);

#endif
