/*
 * A random problem from the whole option space: generated from one number, computed by the library,
 * and compared with the reference. Memory that must not be read is NaN, memory that must not be
 * written is checked, and outputs begin as NaN.
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

/* Which problems are generated: any, or those that reveal one class of faults. */
typedef enum random_focus {
    RANDOM_ANYTHING = 0,
    RANDOM_EMPTY,   /* sequences without queries or keys, queries that see no key */
    RANDOM_UNUSED,  /* padding, pages, hidden keys: memory that must not be read */
    RANDOM_GRID,    /* more batch items or heads than a grid's 65,535 */
    RANDOM_HEADS,   /* many heads and items of several tiles: blocks take them in groups */
    RANDOM_LENGTHS, /* packed, padded, paged; of length 0 and 1; rows after the last sequence */
    RANDOM_PAGED,   /* keys and values in pages of every size, queries packed or not */
    RANDOM_STRIDES, /* any order and gaps, broadcast, backwards, misaligned */
    /* In the order of their numbers: every head dim to 256, then every remainder of the tiles. */
    RANDOM_TAILS,
    RANDOM_MASKS,      /* causal, diagonals, windows; different lengths of queries and keys */
    RANDOM_SPLIT,      /* few queries, many keys, more than one batch item */
    RANDOM_INVARIANCE, /* FA_BATCH_INVARIANT: each item alone has the same bits */
    RANDOM_DROPOUT,    /* values from which every bit of the dropout mask can be read */
    RANDOM_WIDE,       /* head dims of 257 to 512, without options that change scores */
    RANDOM_BIAS,       /* a bias and its gradient, which heads or batch items may share */
    RANDOM_CHUNKS,     /* chunked attention, mostly causal */
    RANDOM_QUANTIZED,  /* float8 and int8 keys and values, with scales of every shape */
    /* Head dims of 513 to 576 for keys; the values are mostly columns of the keys. */
    RANDOM_LATENT,
    /* Rows that few keys dominate, by number: results must be as exact as those of the best
     * kernels. */
    RANDOM_PEAKED
} random_focus;

/* The scores of RANDOM_PEAKED. Problem n has kind n % RANDOM_NUM_PEAKS. This number has no common
 * divisor with the numbers of head dims, options and types, so all combinations occur. */
typedef enum random_peak {
    PEAK_4 = 0,   /* queries are 4 times as large as usual */
    PEAK_16,      /* 16 times */
    PEAK_64,      /* 64 times */
    PEAK_SPIKE,   /* each query has the direction of one key */
    PEAK_2,       /* 2 times */
    PEAK_NONE,    /* standard normal scores: flat rows */
    PEAK_LATE,    /* flat in the first half of the keys, then peaked */
    PEAK_GROWN,   /* flat except for one key of the second half, which dominates */
    PEAK_IMMENSE, /* the same, by 2^80 to 2^180 */
    PEAK_FIRST,   /* the first key dominates, like an attention sink */
    PEAK_SECOND,  /* the first key dominates, and one of the second half a little more */
    PEAK_EQUAL,   /* all scores are 0 */
    PEAK_FEW,     /* one query of 8 is 6 times as large as the others */
    RANDOM_NUM_PEAKS
} random_peak;

/* The number of different problems of RANDOM_TAILS. */
enum { RANDOM_NUM_TAILS = 256 + 64 + 80 + 96 + 128 + 176 + 192 };

/* A call of the library. Every pointer points into one of the buffers, except for the tensors' own
 * structs and the two arrays of fa_combine. */
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

/* What `attend` below returns after two runs. clean: neither wrote to memory beside its workspace; same: both left the same bits.
 * If not, message says which. */
fa_status random_status_of_runs(bool clean, bool same, char *message, size_t size);

/* Makes a call instead of the library, for example in other memory. If it fails, it writes the
 * reason to message (of that size). If a result is wrong, it explains that, and the status is
 * RANDOM_WRONG. */
typedef fa_status random_attend(void *context, const random_call *call, char *message, size_t size);

typedef struct random_settings {
    fa_device device;
    int32_t threads; /* 0: each problem chooses 1 to 3 */
    /* Problems for the branches of kernels with tensor cores: 16 bits, their head dims, many tiles.
     * The reference takes some ten times as long. */
    bool tiles;
    random_focus focus;
    bool wide_heads;        /* head dims of 257 to 512 in most problems of the other classes, too */
    bool few_queries;       /* RANDOM_PEAKED: for kernels that run on the CPU */
    bool small;             /* a fourth of the work, for the same reason */
    const char *focus_name; /* its name in the command; NULL: RANDOM_ANYTHING */
    bool one_pass;          /* only problems of this pass */
    random_pass pass;
    bool
        /* The forward before a backward is not compared: attend's is known to be correct. */
        backward_alone;
    int runs;          /* of a backward, each compared, with the same initial memory; 0: one */
    bool plain_scores; /* no ALiBi, bias, mask or dropout */
    bool unseen_keys;  /* a causal mask in each problem that hides the later half of the keys */
    bool many_heads;   /* RANDOM_BIAS with the sizes of RANDOM_HEADS */
    bool one_dtype;    /* all tensors have this type */
    fa_dtype dtype;
    fa_precision precision; /* of all problems */
    /* Computes forward and decode, and if all_passes is set also the others; otherwise there are no
     * problems of those. NULL: the library computes. */
    bool all_passes;
    random_attend *attend;
    void *context;
    /* Whether to make the problem's call; NULL: always. It is called before arrays have their
     * contents, which takes long: only shapes, lengths and options are set. If it returns false,
     * the status is FA_ERROR_UNSUPPORTED. For backward, the call is that of the gradients. */
    bool (*wants)(void *context, const random_call *call);
} random_settings;

typedef struct random_result {
    random_pass pass;
    fa_dtype dtype;   /* of q (combine: of the parts) */
    fa_status status; /* of the call that failed, otherwise FA_OK */
    ref_report report;
    char description[800]; /* one line */
    char reproduce[176];   /* a command line */
} random_result;

/* Generates problem number `number` and checks it. May run in several threads at the same time. */
void random_problem_run(uint64_t number, const random_settings *settings, random_result *result);

#endif
