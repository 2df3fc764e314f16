/*
 * Whether this process may use AMX. Linux gives the tiles' state, 8 KB a thread, to those only that ask.
 */
#ifndef FA_CPU_AMX_H
#define FA_CPU_AMX_H

#include <stdbool.h>

/* The processor has tiles and products of bfloat16, and the operating system would keep their state. */
bool fa_amx_is_there(void);

/* Asks the kernel, once, for all threads that there are and will be; says whether it agreed. Signal
 * stacks (sigaltstack) must then have room for the tiles: so nothing else asks before AMX is used. */
bool fa_amx_request(void);

#endif
