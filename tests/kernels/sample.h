/*
 * Chooses the random problems that the tests of kernels on the host run. FA_ALL_TESTS=1 in the
 * environment: all; another number n, as in CI: a sample, and every nth problem, of large ones every
 * 3nth, for these take most of the time and have the same kinds of tiles. By default only a sample, so that `make test` stays short: for each variant one problem; for each option one with
 * each family of kernels that supports it; and of the small problems some of each variant,
 * beginning at a different one for each variant. A test goes through its problems twice: the first
 * time none is run, to find the smallest problem for each need that is not tiny.
 */
#ifndef FA_TEST_SAMPLE_H
#define FA_TEST_SAMPLE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "cuda/plan.h"

enum {
    SAMPLE_EVERY = 4,        /* of problems made by hand */
    SAMPLE_LARGE_EVERY = 3,  /* of every nth problem, of large ones */
    SAMPLE_SMALL_EVERY = 16, /* of small ones of a variant */
    SAMPLE_SETS = 64,
    SAMPLE_FAMILIES = 16,
    SAMPLE_OPTIONS = 64,
    SAMPLE_FIRST_OTHER = 40
};

/* Multiply-adds of a problem that is not tiny: some tiles of queries and of keys. */
static const double sample_work = 5e6, sample_small_work = 1e7, sample_large_work = 2e7;

/* A property that some problem must have. */
typedef struct sample_need {
    double work; /* of the problem that is run for it; 0: there is none */
    bool met;
    int offered; /* problems with this property */
} sample_need;

static struct {
    bool whole;     /* nothing is left out */
    bool searching; /* the test looks for the smallest problems: none is run */
    int every;      /* every n-th problem is run in addition to the sample; 0: none */
    int64_t taken, left_out;
    sample_need variants[FA_VARIANTS], options[SAMPLE_FAMILIES][SAMPLE_OPTIONS];
    const void *families[SAMPLE_FAMILIES];
    int set_taken[SAMPLE_SETS], set_left_out[SAMPLE_SETS]; /* of sample_has */
} sample;

/* Whether the test goes through its problems twice. whole: nothing is left out, for example if
 * problems are requested by their numbers. */
static inline bool sample_begin(bool whole)
{
    const char *all = getenv("FA_ALL_TESTS");
    sample.every = all ? atoi(all) : 0;
    sample.whole = whole || sample.every == 1;
    sample.searching = !sample.whole;
    return sample.searching;
}

/* From now on, problems are run. */
static inline void sample_found(void) { sample.searching = false; }

/* The properties of a problem, a bit for each option. */
static inline uint64_t sample_options_of(const fa_problem *p)
{
    const bool options[] = {
        p->causal,
        p->diagonal_given,
        p->window_left >= 0,
        p->window_right >= 0,
        p->attention_chunk > 0,
        p->softcap > 0,
        p->bias.data != NULL,
        p->bias.data && p->bias.dtype == FA_FLOAT32,
        p->mask.data != NULL,
        p->alibi_slopes != NULL,
        p->sinks != NULL,
        p->dropout_threshold > 0,
        p->dropout_state != NULL,
        p->deterministic,
        p->batch_invariant,
        p->cu_seqlens_q != NULL,
        p->cu_seqlens_k != NULL,
        p->seqlens_q != NULL,
        p->seqlens_k != NULL,
        p->block_table != NULL,
        p->q_descale || p->k_descale || p->v_descale,
        p->k_scale.data != NULL,
        p->v_scale.data != NULL,
        p->k.dtype == FA_FLOAT8_E4M3,
        p->k.dtype == FA_INT8,
        p->v.data == p->k.data,
        p->lse == NULL,
        p->heads_q > p->heads_kv,
        p->d != p->d_v,
        p->dlse != NULL,
        p->dbias.data != NULL,
        p->dsinks != NULL,
        p->pass == FA_PASS_BACKWARD && !p->dq.data,
        p->pass == FA_PASS_BACKWARD && !p->dk.data,
        p->pass == FA_PASS_BACKWARD && !p->dv.data,
        p->pass == FA_PASS_DECODE,
    };
    uint64_t bits = 0;
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        bits |= (uint64_t)options[i] << i;
    return bits;
}

static inline int sample_family(const void *family)
{
    int i = 0;
    while (sample.families[i] && sample.families[i] != family)
        if (++i == SAMPLE_FAMILIES) abort();
    sample.families[i] = family;
    return i;
}

/* Whether a problem with this much work is better than another. */
static inline bool sample_is_better(double work, double other)
{
    if (other == 0) return true;
    if (work < sample_work || other < sample_work) return work > other;
    return work < other;
}

/* The needs that a problem meets: its variants, and its options with its family. */
typedef struct sample_needs {
    sample_need *need[FA_CUDA_LAUNCHES + SAMPLE_OPTIONS];
    int count;
    int rarest; /* of the variants */
} sample_needs;

static inline sample_needs sample_needs_of(const fa_problem *p, const fa_cuda_plan *plan,
                                           uint64_t other)
{
    const uint64_t options = sample_options_of(p) | other << SAMPLE_FIRST_OTHER;
    const int family = sample_family(plan->family);
    sample_needs n = {.rarest = FA_NO_VARIANT};
    for (int i = 0; i < plan->count; i++) {
        const int v = plan->launches[i].variant;
        if (plan->launches[i].idle) continue;
        n.need[n.count++] = &sample.variants[v];
        if (n.rarest < 0 || sample.variants[v].offered < sample.variants[n.rarest].offered)
            n.rarest = v;
    }
    for (int i = 0; i < SAMPLE_OPTIONS; i++)
        if (options >> i & 1) n.need[n.count++] = &sample.options[family][i];
    return n;
}

/* Whether the problem is in the sample. other: bits for additional options. Needs that arise only
 * while problems are run, because a test chooses its variants by what has run, are met by the first
 * problem. */
static inline bool sample_takes(const fa_problem *p, const fa_cuda_plan *plan, uint64_t other)
{
    const sample_needs n = sample_needs_of(p, plan, other);
    const double work =
        1 + (double)(p->batch * p->heads_q) * (double)(p->n_q * p->n_k) * (double)(p->d + p->d_v);
    bool takes = sample.whole;
    for (int i = 0; i < n.count; i++) {
        sample_need *need = n.need[i];
        if (!sample.searching) takes |= !need->met && (need->work == 0 || work == need->work);
        else if (sample_is_better(work, need->work)) need->work = work;
    }
    if (sample.searching) return false;
    const int every = sample.every * (work > sample_large_work ? SAMPLE_LARGE_EVERY : 1);
    if (every) takes |= (sample.taken + sample.left_out) % every == 0;
    if (n.rarest >= 0 && work < sample_small_work)
        takes |= (++sample.variants[n.rarest].offered + n.rarest) % SAMPLE_SMALL_EVERY == 0;
    for (int i = 0; i < n.count && takes; i++) n.need[i]->met = true;
    sample.taken += takes;
    sample.left_out += !takes;
    return takes;
}

/* The same for problems made by hand: number i of a set. The test numbers its sets. The first ones
 * of consecutive sets differ. */
static inline bool sample_has(int64_t i, int set)
{
    const int every = sample.every ? sample.every : SAMPLE_EVERY;
    const bool has = sample.whole || (i + set) % every == 0;
    sample.taken += has;
    sample.left_out += !has;
    sample.set_taken[set] += has;
    sample.set_left_out[set] += !has;
    return has;
}

/* Reports what was left out. Each kernel must have run, and some problem of each set. */
static inline void sample_end(void (*const kernels[FA_VARIANTS])(const void *parameters),
                              const int runs[FA_VARIANTS])
{
    for (int i = 0; i < FA_VARIANTS; i++)
        CHECK(runs[i] || !kernels[i], "no problem was for %s", fa_variants[i].name);
    for (int i = 0; i < SAMPLE_SETS; i++)
        CHECK(sample.set_taken[i] || !sample.set_left_out[i], "set %d: all left out", i);
    if (sample.left_out)
        printf("%lld of %lld problems left out (FA_ALL_TESTS=1: all)\n", (long long)sample.left_out,
               (long long)(sample.left_out + sample.taken));
}

#endif
