/*
 * Asks the processor and Linux for AMX. The answers are kept, because every call of the library needs
 * them and asking is slow: CPUID leaves a virtual machine.
 */
#include "amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* From Linux's <asm/prctl.h>, which may be older than the kernel. */
#define GET_SUPPORTED_STATES 0x1021 /* ARCH_GET_XCOMP_SUPP */
#define REQUEST_STATE 0x1023        /* ARCH_REQ_XCOMP_PERM */

enum { TILE_CONFIGURATION = 17, TILE_DATA = 18 }; /* components of the extended state */

static bool processor_has_it(void)
{
    const unsigned os_saves_state = 1u << 27, tiles = 1u << 24, bfloat16 = 1u << 22;
    const uint64_t states = (uint64_t)1 << TILE_CONFIGURATION | (uint64_t)1 << TILE_DATA;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & os_saves_state)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & tiles) || !(d & bfloat16)) return false;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (((uint64_t)high << 32 | low) & states) == states;
}

static bool kernel_knows_it(void)
{
    uint64_t states = 0;
    return syscall(SYS_arch_prctl, GET_SUPPORTED_STATES, &states) == 0 && states >> TILE_DATA & 1;
}

typedef enum answer { NOT_ASKED, NO, YES } answer;

static atomic_int there = NOT_ASKED, agreed = NOT_ASKED; /* threads that ask together agree */

bool fa_amx_is_there(void)
{
    if (atomic_load(&there) == NOT_ASKED)
        atomic_store(&there, processor_has_it() && kernel_knows_it() ? YES : NO);
    return atomic_load(&there) == YES;
}

bool fa_amx_request(void)
{
    if (!fa_amx_is_there()) return false;
    if (atomic_load(&agreed) == NOT_ASKED) {
        const bool given = syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
        atomic_store(&agreed, given ? YES : NO);
        if (!given) atomic_store(&there, NO); /* nor is it named among what this processor runs */
    }
    return atomic_load(&agreed) == YES;
}
#else
bool fa_amx_is_there(void) { return false; }
bool fa_amx_request(void) { return false; }
#endif
