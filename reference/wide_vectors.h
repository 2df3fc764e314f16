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

/* For the innermost loops over contiguous elements: sanitizers would check each access, and take half of
 * their tests' time for it. The caller touches the last elements instead (TOUCH): an address behind the
 * array is noticed there. */
#if defined(__GNUC__)
#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))
#else
#define UNCHECKED
#endif
#define TOUCH(x, n) ((void)((n) > 0 ? *(const volatile double *)((x) + (n)-1) : 0))

#endif
