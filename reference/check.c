#include "check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "scalar.h"

void ref_fail(ref_report *report, const char *format, ...)
{
    if (report->ok) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(report->message, sizeof report->message, format, arguments);
        va_end(arguments);
    }
    report->ok = false;
}

double ref_allowance(fa_dtype dtype, double want, double error)
{
    double rounding = ref_epsilon(dtype) / 2 * (fabs(want) + error) + ref_smallest(dtype);
    return error + rounding + 1e-35; /* weights below 2^-126 may be flushed to 0 */
}

/* NULL if got is near enough to want; otherwise an error message. */
static const char *compare(ref_report *report, fa_dtype dtype, double got, double want,
                           double error)
{
    if (isnan(want)) return isnan(got) ? NULL : "expected NaN";
    if (isinf(want)) return got == want ? NULL : "expected an infinity";
    double allowed = ref_allowance(dtype, want, error), difference = fabs(got - want);
    if (!(difference <= report->worst_absolute)) report->worst_absolute = difference;
    if (!(difference / allowed <= report->worst)) report->worst = difference / allowed;
    return difference <= allowed ? NULL : "too far away";
}

void ref_check_tensor(ref_report *report, const char *name, const fa_tensor *got,
                      const ref_array *want)
{
    for (int axis = 0; axis < 4; axis++)
        if (got->shape[axis] != want->shape[axis]) {
            ref_fail(report, "%s: extent %d is %lld, the reference has %lld", name, axis,
                     (long long)got->shape[axis], (long long)want->shape[axis]);
            return;
        }
    int64_t n = 0;
    for (int64_t a = 0; a < got->shape[0]; a++)
        for (int64_t b = 0; b < got->shape[1]; b++)
            for (int64_t c = 0; c < got->shape[2]; c++)
                for (int64_t d = 0; d < got->shape[3]; d++, n++) {
                    double value = ref_load(got, a, b, c, d);
                    const char *wrong =
                        compare(report, got->dtype, value, want->value[n], want->error[n]);
                    if (wrong)
                        ref_fail(report,
                                 "%s[%lld,%lld,%lld,%lld] = %.9g, reference %.9g +- %.2g: %s", name,
                                 (long long)a, (long long)b, (long long)c, (long long)d, value,
                                 want->value[n], want->error[n], wrong);
                }
}

/* Puts an error into a list of the largest ones, in descending order; a NaN comes first. */
static void keep_largest(double *list, int length, double error)
{
    int at = length;
    while (at > 0 && !(error <= list[at - 1])) at--;
    if (at == length) return;
    memmove(list + at + 1, list + at, (size_t)(length - 1 - at) * sizeof *list);
    list[at] = error;
}

static ref_distance distance_of(const double *got, const double *exact, int64_t count)
{
    enum { LARGEST = 16 };
    double errors = 0, all = 0, largest[LARGEST] = {0}, sum = 0;
    ref_distance d = {0, 0};
    for (int64_t n = 0; n < count; n++) {
        const double error = fabs(got[n] - exact[n]);
        errors += error * error;
        all += exact[n] * exact[n];
        keep_largest(largest, LARGEST, error);
    }
    if (errors != 0) d.relative = sqrt(errors / all);
    const int of = count < LARGEST ? (int)count : LARGEST;
    for (int i = 0; i < of; i++) sum += largest[i];
    if (of > 0) d.largest = sum / of;
    return d;
}

static int64_t count_of(const ref_array *array)
{
    return array->shape[0] * array->shape[1] * array->shape[2] * array->shape[3];
}

ref_distance ref_distance_of(const fa_tensor *got, const ref_array *exact)
{
    const int64_t *s = exact->shape;
    ref_array values = ref_array_new(s[0], s[1], s[2], s[3]);
    int64_t n = 0;
    for (int64_t a = 0; a < s[0]; a++)
        for (int64_t b = 0; b < s[1]; b++)
            for (int64_t c = 0; c < s[2]; c++)
                for (int64_t d = 0; d < s[3]; d++) values.value[n++] = ref_load(got, a, b, c, d);
    const ref_distance distance = distance_of(values.value, exact->value, n);
    ref_array_free(&values);
    return distance;
}

/* The size of the exact result's largest element. */
static double largest_of(const ref_array *exact)
{
    double largest = 0;
    for (int64_t n = 0; n < count_of(exact); n++) largest = fmax(largest, fabs(exact->value[n]));
    return largest;
}

void ref_check_exactness(ref_report *report, const char *name, const fa_tensor *got,
                         const ref_array *exact, const ref_array *rounded, ref_distance times)
{
    const double single = 16 * ref_epsilon(FA_FLOAT32);
    const ref_distance best = distance_of(rounded->value, exact->value, count_of(exact));
    const ref_distance ours = ref_distance_of(got, exact);
    if (!(ours.relative <= times.relative * best.relative + single))
        ref_fail(
            report,
            "%s: the relative error is %.3g, that of weights rounded at each row's maximum %.3g: "
            "%.2f times, expected at most %.2f",
            name, ours.relative, best.relative, ours.relative / best.relative, times.relative);
    if (!(ours.largest <= times.largest * best.largest + single * largest_of(exact)))
        ref_fail(
            report,
            "%s: the largest errors are %.3g, those of weights rounded at each row's maximum %.3g: "
            "%.2f times, expected at most %.2f",
            name, ours.largest, best.largest, ours.largest / best.largest, times.largest);
}

void ref_check_floats(ref_report *report, const char *name, const float *got, const ref_array *want)
{
    const int64_t *s = want->shape;
    fa_tensor view = {0};
    view.data = (void *)(uintptr_t)got;
    for (int axis = 0; axis < 4; axis++) view.shape[axis] = s[axis];
    view.stride[0] = s[1] * s[2] * s[3];
    view.stride[1] = s[2] * s[3];
    view.stride[2] = s[3];
    view.stride[3] = 1;
    ref_check_tensor(report, name, &view, want);
}
