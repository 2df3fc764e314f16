#ifndef REF_WIDE_VECTORS_H
#define REF_WIDE_VECTORS_H

/* Functions that take most of the tests' time are also compiled for wide vectors. ISO C forbids
 * contraction here, so all versions give the same bits. Sanitizers do not support the resolver that
 * chooses one. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&       \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WITH_WIDE_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WITH_WIDE_VECTORS
#endif

#endif
