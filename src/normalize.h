/*
 * From the caller's arguments to a checked problem.
 */
#ifndef FA_NORMALIZE_H
#define FA_NORMALIZE_H

#include "arguments.h"
#include "problem.h"

/* Checks every argument and fills in the problem; FA_ERROR_ARGUMENT or FA_ERROR_UNSUPPORTED. */
fa_status fa_problem_make(const fa_arguments *arguments, fa_problem *problem);

/* The same for fa_combine. The problem's device, parts, part_lse, num_parts and lse are set already, as given. */
fa_status fa_combine_problem_make(const fa_tensor *out, const fa_options *options,
                                  fa_combine_problem *problem);

/* The same for fa_append. */
fa_status fa_append_problem_make(const fa_append_call *call, fa_append_problem *problem);

struct fa_check_report; /* kernels/check/check.h */

/* Sets the CPU's error message for a fault that FA_CHECK has found on a device. where: ends the sentence. */
fa_status fa_problem_report(const struct fa_check_report *report, const char *where);

#endif
