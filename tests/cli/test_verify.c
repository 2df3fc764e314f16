/* `flashattn verify`: classes of problems, several at the same time, the output. On the CPU; with a
 * GPU the same command uses the GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

static const char *const classes[] = {"empty",  "unused", "lengths", "strides",    "tails",
                                      "masks",  "split",  "grid",    "invariance", "dropout",
                                      "wide",   "bias",   "chunks",  "quantized",  "latent",
                                      "peaked", "paged",  "heads"};

/* Without FA_ALL_TESTS there are fewer problems. */
static bool leaves_out(void)
{
    const char *all = getenv("FA_ALL_TESTS");
    return !all || !*all;
}

/* A few problems of each class, and the line that counts them. */
static void test_classes(void)
{
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++) {
        char line[64];
        const char *cases = strcmp(classes[i], "grid") == 0 || leaves_out() ? "2" : "9";
        const outcome *o = EXPECT_FINE("verify", "--class", classes[i], "--cases", cases, "--seed",
                                       "1", "--threads", "1");
        snprintf(line, sizeof line, "%-10s %6s problems in", classes[i], cases);
        CHECK(strstr(o->out, line) == o->out, "%s: %s", classes[i], o->out);
        snprintf(line, sizeof line, "%s problems of classes and 0 random problems", cases);
        CHECK(strstr(o->out, line) != NULL, "%s: %s", classes[i], o->out);
    }
}

/* Every class has problems for backward, or for other passes if it only applies to those. */
static void test_backward(void)
{
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        EXPECT_FINE("verify", "--class", classes[i], "--pass", "backward", "--cases",
                    leaves_out() ? "1" : "2", "--seed", "1", "--threads", "1");
}

/* Options of peaked rows are none of fa_combine's. */
static void test_combine(void)
{
    EXPECT_FINE("verify", "--class", "peaked", "--pass", "combine", "--cases", "9", "--seed", "3",
                "--threads", "1");
}

/* A class and one type: keys and values of a quantized cache stay in 8 bits. Without FA_ALL_TESTS
 * each class has one type, and each type a third of the classes. */
static void test_dtypes(void)
{
    static const char *const dtypes[] = {"f32", "f16", "bf16"};
    const bool few = leaves_out();
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        for (size_t j = 0; j < sizeof dtypes / sizeof dtypes[0]; j++)
            if (!few || i % 3 == j)
                EXPECT_FINE("verify", "--class", classes[i], "--dtype", dtypes[j], "--cases",
                            few ? "1" : "2", "--seed", "1", "--threads", "1");
    if (few)
        printf("%d of %d types of classes left out, others shortened (FA_ALL_TESTS=1: all)\n",
               (int)(2 * sizeof classes / sizeof classes[0]),
               (int)(3 * sizeof classes / sizeof classes[0]));
}

/* The same problem, whichever thread computes it and however many run at the same time. */
static void test_case(void)
{
    const outcome *o = EXPECT_FINE("verify", "--class", "tails", "--case", "79", "--threads", "1");
    CHECK(strstr(o->out, " d=80 d_v=80 ") != NULL, "problem 79 has head dim 80: %s", o->out);
    o = EXPECT_FINE("verify", "--class", "dropout", "--case", "3", "--threads", "1");
    CHECK(strstr(o->out, " dropout=") != NULL, "no dropout: %s", o->out);
    o = EXPECT_FINE("verify", "--class", "invariance", "--case", "3", "--threads", "1");
    CHECK(strstr(o->out, "batch=1 ") == NULL, "one item alone: %s", o->out);
    o = EXPECT_FINE("verify", "--tiles", "--case", "3", "--threads", "1");
    CHECK(strstr(o->out, "1 random problems") != NULL, "%s", o->out);
}

static void test_jobs(void)
{
    const outcome *o =
        EXPECT_FINE("verify", "--cases", "40", "--seed", "2", "--jobs", "3", "--threads", "1");
    CHECK(strstr(o->out, "\n40 random problems in ") != NULL, "%s", o->out);
    o = EXPECT_FINE("verify", "--class", "masks", "--cases", "12", "--jobs", "3", "--json");
    CHECK(harness_is_json_lines(o->out), "no JSON: %s", o->out);
    CHECK(strstr(o->out, "{\"ok\": true, \"class\": \"masks\", \"problems\": 12, ") == o->out, "%s",
          o->out);
}

static void test_mistakes(void)
{
    EXPECT_ERROR("--class is \"nonsense\"", "verify", "--class", "nonsense");
    EXPECT_ERROR("--large needs --device cuda", "verify", "--large");
    EXPECT_ERROR("--jobs is \"0\"; expected an integer from 1 to 64", "verify", "--jobs", "0");
}

int main(int argc, char **argv)
{
    harness_begin(argc, argv);
    test_classes();
    test_backward();
    test_combine();
    test_dtypes();
    test_case();
    test_jobs();
    test_mistakes();
    return harness_end();
}
