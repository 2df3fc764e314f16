/*
 * Random numbers for tests: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
 * generators", OOPSLA 2014). The same on every machine.
 */
#ifndef REF_RANDOM_H
#define REF_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ref_random {
    uint64_t state;
} ref_random;

static inline uint64_t ref_random_bits(ref_random *r)
{
    uint64_t z = r->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniform in [low, high], both included. */
static inline int64_t ref_random_between(ref_random *r, int64_t low, int64_t high)
{
    return low + (int64_t)(ref_random_bits(r) % (uint64_t)(high - low + 1));
}

/* True with probability 1 / n. */
static inline bool ref_random_once_in(ref_random *r, int64_t n)
{
    return ref_random_between(r, 1, n) == 1;
}

/* Uniform in [0, 1). */
static inline double ref_random_unit(ref_random *r)
{
    return (double)(ref_random_bits(r) >> 11) * 0x1p-53;
}

/* Mean 0, variance 1, bell-shaped: 12 uniforms. */
static inline double ref_random_normal(ref_random *r)
{
    double sum = -6;
    for (int n = 0; n < 6; n++) {
        uint64_t bits = ref_random_bits(r);
        sum += (double)(bits >> 32) * 0x1p-32 + (double)(bits & 0xffffffffu) * 0x1p-32;
    }
    return sum;
}

#endif
