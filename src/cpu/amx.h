/*
 * Whether this process may use AMX. Linux gives the tiles' state, 8 KB for each thread, only to processes
 * that ask for it.
 */
#ifndef FA_CPU_AMX_H
#define FA_CPU_AMX_H

#include <stdbool.h>

/* The processor has tiles and products of bfloat16, and the operating system would keep their state. */
bool fa_amx_is_there(void);

/* Asks Linux once, for all existing and future threads; returns whether it agreed. Signal stacks
 * (sigaltstack) must then have room for the tiles, so this is called only when AMX will be used. */
bool fa_amx_request(void);

#endif
