/*
 * The functions that each instruction set's build of the engine defines, and the engine itself.
 */
#ifndef FA_CPU_ISA_H
#define FA_CPU_ISA_H

#include "engine.h"

/* fa_cpu_<name>_<instruction set>. FA_ISA comes from the build. */
#define FA_PASTE3(a, b, c) a##b##_##c
#define FA_PASTE2(a, b, c) FA_PASTE3(a, b, c)
#define FA_NAME(name) FA_PASTE2(fa_cpu_, name, FA_ISA)

fa_status FA_NAME(forward)(const fa_problem *p);
fa_status FA_NAME(backward)(const fa_problem *p);
fa_status FA_NAME(decode)(const fa_problem *p);
fa_status FA_NAME(weights)(const fa_problem *p);
fa_status FA_NAME(combine)(const fa_combine_problem *p);

/* The rest of the line that fa_describe writes. */
void FA_NAME(describe_forward)(const fa_problem *p, char *text, size_t size);
void FA_NAME(describe_backward)(const fa_problem *p, char *text, size_t size);
void FA_NAME(describe_decode)(const fa_problem *p, char *text, size_t size);

extern const fa_cpu_engine FA_NAME(engine);

#endif
