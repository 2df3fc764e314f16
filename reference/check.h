/*
 * Compares results with the reference. An element passes if it is as near as its error and the
 * rounding of its dtype allow; infinities and NaN must be in the same places as in the reference.
 */
#ifndef REF_CHECK_H
#define REF_CHECK_H

#include "reference.h"

typedef struct ref_report {
    bool ok;
    double worst;          /* the largest error, relative to the allowed one */
    double worst_absolute; /* the largest absolute error */
    char message[400];     /* of the first failure */
} ref_report;

#define REF_REPORT_INIT                                                                            \
    {                                                                                              \
        true, 0, 0, ""                                                                             \
    }

/* Counts a failure and keeps the first one's message. */
void ref_fail(ref_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* How far a finite element of this dtype may be from want, whose error is given: that error, plus
 * the element's own rounding. */
double ref_allowance(fa_dtype dtype, double want, double error);

/* Compares all elements of a tensor of want's shape. */
void ref_check_tensor(ref_report *report, const char *name, const fa_tensor *got,
                      const ref_array *want);

/* The same for contiguous float32, such as lse. */
void ref_check_floats(ref_report *report, const char *name, const float *got,
                      const ref_array *want);

/* How far a whole result is from the exact one: the norm of all errors, relative to that of all
 * elements, and the mean of the 16 largest errors, because a single one varies by chance. */
typedef struct ref_distance {
    double relative, largest;
} ref_distance;

ref_distance ref_distance_of(const fa_tensor *got, const ref_array *exact);

/* Whether got is as exact as the best implementations: its distance from exact may be at most
 * `times` that of `rounded`, which ref_forward_rounded computes from the same inputs. Errors of
 * float32 arithmetic do not count. */
void ref_check_exactness(ref_report *report, const char *name, const fa_tensor *got,
                         const ref_array *exact, const ref_array *rounded, ref_distance times);

#endif
