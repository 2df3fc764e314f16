/*
 * The vector exponential against long double, over all exponents of float32: at most 2 ulp for
 * results of 2^-126 and more, at most 2^-126 off below (0 is allowed there), and the right limits.
 */
#include <math.h>
#include <stdio.h>

#include "check.h"
#include "cpu/dispatch.h"
#include "random.h"

enum { PER_EXPONENT = 2048, BLOCK = 2 * 256 * PER_EXPONENT };

static float y[BLOCK], found[BLOCK];

static float from_bits(uint32_t bits)
{
    union {
        uint32_t bits;
        float value;
    } u = {bits};
    return u.value;
}

/* Every sign and exponent, with random and extreme fractions. */
static void fill(ref_random *random)
{
    int n = 0;
    for (uint32_t top = 0; top < 512; top++)
        for (int k = 0; k < PER_EXPONENT; k++, n++) {
            uint32_t fraction = (uint32_t)ref_random_bits(random) & 0x7fffffu;
            if (k == 0) fraction = 0;
            if (k == 1) fraction = 0x7fffffu;
            y[n] = from_bits(top << 23 | fraction);
        }
}

/* The error in units of the last place of the result. */
static double error_in_ulp(long double expected, float got)
{
    int exponent;
    (void)frexpl(expected, &exponent);
    return (double)(fabsl((long double)got - expected) / ldexpl(1, exponent - 24));
}

static void check_value(float c, float x, float got, double *worst)
{
    long double expected = exp2l((long double)x * (long double)c);
    if (isnan(x)) {
        CHECK(isnan(got), "exp2(NaN) = %g", (double)got);
    } else if (expected >= 0x1p128L) {
        CHECK(isinf(got) && got > 0, "exp2(%a * %a) = %g, expected infinity", (double)x, (double)c,
              (double)got);
    } else if (expected >= 0x1p-126L) {
        double error = error_in_ulp(expected, got);
        if (error > *worst) *worst = error;
        if (!(error <= 2))
            CHECK(false, "exp2(%a * %a) = %a, %.2f ulp off", (double)x, (double)c, (double)got,
                  error);
    } else if (!(got >= 0 && (long double)got <= 0x1p-126L)) {
        CHECK(false, "exp2(%a * %a) = %a, expected under 2^-126", (double)x, (double)c,
              (double)got);
    }
}

int main(void)
{
    static const float factors[] = {1.0f, 1.44269504f, 0.18033688f, 0.0637f, 37.5f};
    char why[256];
    ref_random random = {1};
    test_begin();
    const fa_cpu_engine *engine = fa_cpu_engine_get(why, sizeof why);
    CHECK(engine != NULL, "%s", why);
    if (!engine) return test_end();
    for (int f = 0; f < 5; f++) {
        double worst = 0;
        fill(&random);
        engine->exp2_array(y, factors[f], found, BLOCK - f); /* also lengths with a remainder */
        for (int n = 0; n < BLOCK - f; n++) check_value(factors[f], y[n], found[n], &worst);
        CHECK(worst <= 2, "factor %g: %.3f ulp", (double)factors[f], worst);
        printf("%s, factor %g: at most %.3f ulp\n", engine->name, (double)factors[f], worst);
    }
    return test_end();
}
