/* Every misuse of the command line: the message, the exit code, and nothing written. */
#include <stddef.h>
#include <string.h>

#include "harness.h"

#define INPUTS "--q", "a.npy", "--k", "a.npy", "--v", "a.npy"
#define FILES INPUTS, "--out", "o.npy"

static void write_inputs(void)
{
    float data[12];
    harness_fill(data, 12, 1, 1);
    harness_write_npy("a.npy", "<f4", "(1, 3, 2, 2)", data, sizeof data);
    harness_write_npy("b3.npy", "<f4", "(3, 2, 2)", data, sizeof data);
    harness_write_npy("batch3.npy", "<f4", "(3, 1, 2, 2)", data, sizeof data);
    harness_write_npy("b2.npy", "<f4", "(3, 4)", data, sizeof data);
    harness_write_npy("b1.npy", "<f4", "(12,)", data, sizeof data);
    harness_write_npy("b0.npy", "<f4", "()", data, 4);
    harness_write_npy("b5.npy", "<f4", "(1, 1, 3, 2, 2)", data, sizeof data);
    harness_write_npy("ints.npy", "<i4", "(1, 3, 2, 2)", data, sizeof data);
    harness_write_npy("heads3.npy", "<f4", "(1, 2, 3, 2)", data, sizeof data);
    const int32_t lengths[4] = {3, 0, 3, 1};
    const int64_t wide[1] = {INT64_C(1) << 40};
    const int32_t pages[6] = {0, -1, 0, 0, 1, 0};
    harness_write_npy("one.npy", "<i4", "(1,)", lengths, 4);
    harness_write_npy("two.npy", "<i4", "(2,)", lengths, 8);
    harness_write_npy("zero_three.npy", "<i4", "(2,)", lengths + 1, 8);
    const int32_t cu[3] = {0, 1, 3};
    harness_write_npy("zero_one_three.npy", "<i4", "(3,)", cu, sizeof cu);
    harness_write_npy("long.npy", "<i4", "(1,)", "\x04\0\0", 4);
    harness_write_npy("wide.npy", "<i8", "(1,)", wide, sizeof wide);
    harness_write_npy("pages.npy", "<i4", "(1, 2)", pages, 8);
    harness_write_npy("far.npy", "<i4", "(1, 2)", pages + 3, 8);
    harness_write_npy("dim1.npy", "<f4", "(1, 3, 4, 1)", data, sizeof data);
}

static void test_dispatch(void)
{
    EXPECT_ERROR("a command is missing", NULL);
    EXPECT_ERROR(
        "\"walk\" is not a command; expected run, grad, bench, verify, job, ladder or info",
        "walk");
    EXPECT_ERROR("--version takes no arguments; found \"now\"", "--version", "now");
    const outcome *o = EXPECT_FINE("--version");
    CHECK(strncmp(o->out, "flashattn ", 10) == 0 && strstr(o->out, fa_version_string()) != NULL,
          "version: %s", o->out);
    o = EXPECT_FINE("--help");
    static const char *const NAMES[] = {"run", "grad", "bench", "verify", "job", "ladder", "info"};
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++)
        CHECK(strstr(o->out, NAMES[i]) != NULL, "help lacks %s", NAMES[i]);
}

/* Help works whatever else is on the line, and lists the exit codes. */
static void test_help(void)
{
    static const char *const NAMES[] = {"run", "grad", "bench", "verify", "job", "ladder", "info"};
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        const outcome *o = EXPECT_FINE(NAMES[i], "--help");
        CHECK(strstr(o->out, "Usage: flashattn ") == o->out, "usage of %s: %s", NAMES[i], o->out);
        CHECK(strstr(o->out, NAMES[i]) != NULL, "name of %s", NAMES[i]);
        CHECK(strstr(o->out, "Exit codes") != NULL, "exit codes of %s: %s", NAMES[i], o->out);
    }
    const outcome *o = EXPECT_FINE("run", "--nonsense", "--help");
    static const char *const OPTIONS[] = {
        "--q",          "--k",         "--v",         "--out",          "--lse",
        "--mask",       "--bias",      "--causal",    "--diagonal",     "--window",
        "--scale",      "--softcap",   "--alibi",     "--sinks",        "--dropout",
        "--seed",       "--layout",    "--dtype",     "--device",       "--threads",
        "--json",       "--seqlens-q", "--seqlens-k", "--cu-seqlens-q", "--cu-seqlens-k",
        "--block-table"};
    for (size_t i = 0; i < sizeof OPTIONS / sizeof OPTIONS[0]; i++)
        CHECK(strstr(o->out, OPTIONS[i]) != NULL, "help of run lacks %s", OPTIONS[i]);
}

static void test_options(void)
{
    EXPECT_ERROR("--q is missing; expected --q FILE", "run");
    EXPECT_ERROR("--out is missing; expected --out FILE", "run", INPUTS);
    EXPECT_ERROR("\"--fast\" is not an option of this command; flashattn run --help", "run",
                 "--fast");
    EXPECT_ERROR("\"--fast\" is not an option", "run", "--fast=3");
    EXPECT_ERROR("\"-q\" is not an option", "run", "-q", "a.npy");
    EXPECT_ERROR("--q has no value; expected --q FILE", "run", "--q");
    EXPECT_ERROR("--q has no value; expected --q FILE", "run", "--q", "--k", "a.npy");
    EXPECT_ERROR("--q is \"\"; expected FILE", "run", "--q=");
    EXPECT_ERROR("--q is given twice (the second time as b.npy); expected once", "run", "--q",
                 "a.npy", "--q", "b.npy");
    EXPECT_ERROR("--causal is given twice", "run", "--causal", "--causal");
    EXPECT_ERROR("--causal is \"yes\"; expected no value", "run", "--causal=yes");
    EXPECT_ERROR("\"a.npy\" is not expected: this command takes only options", "run", "a.npy");
    EXPECT_ERROR("\"y\" is not expected: DIR is \"x\" already", "job", "x", "y");
    EXPECT_ERROR("--seed is given without --dropout; expected both", "run", FILES, "--seed", "1");
    EXPECT_ERROR("no gradient is asked for", "grad", INPUTS, "--dout", "a.npy");
    EXPECT_ERROR("--dbias is given without --bias", "grad", INPUTS, "--dout", "a.npy", "--dbias",
                 "d.npy");
    EXPECT_ERROR("--dsinks is given without --sinks", "grad", INPUTS, "--dout", "a.npy", "--dsinks",
                 "d.npy");
    EXPECT_ERROR("--dout is missing", "grad", INPUTS, "--dq", "d.npy");
}

static void test_values(void)
{
    EXPECT_ERROR("--diagonal is \"1.5\"; expected an integer fitting 64 bits", "run", "--diagonal",
                 "1.5");
    EXPECT_ERROR("--diagonal is \"9223372036854775808\"; expected an integer", "run", "--diagonal",
                 "9223372036854775808");
    EXPECT_ERROR("--diagonal is \" 1\"; expected", "run", "--diagonal", " 1");
    EXPECT_ERROR("--threads is \"0\"; expected an integer from 1 to", "run", "--threads", "0");
    EXPECT_ERROR("--threads is \"two\"; expected an integer", "run", "--threads", "two");
    EXPECT_ERROR("--window is \"3\"; expected two integers >= -1, separated by a comma", "run",
                 "--window", "3");
    EXPECT_ERROR("--window is \"3,-2\"; expected two integers", "run", "--window", "3,-2");
    EXPECT_ERROR("--window is \"1,2,3\"; expected two integers", "run", "--window=1,2,3");
    EXPECT_ERROR("--window is \"1,\"; expected two integers", "run", "--window", "1,");
    EXPECT_ERROR("--scale is \"big\"; expected a finite number", "run", "--scale", "big");
    EXPECT_ERROR("--scale is \"nan\"; expected a finite number", "run", "--scale", "nan");
    EXPECT_ERROR("--scale is \"-inf\"; expected a finite number", "run", "--scale", "-inf");
    EXPECT_ERROR("--scale is \"1e39\"; expected a finite number", "run", "--scale", "1e39");
    EXPECT_ERROR("--scale is \"1x\"; expected a finite number", "run", "--scale", "1x");
    EXPECT_ERROR("--softcap is \"0\"; expected a number > 0", "run", "--softcap", "0");
    EXPECT_ERROR("--dropout is \"1\"; expected a probability, 0 <= P < 1", "run", "--dropout", "1");
    EXPECT_ERROR("--dropout is \"-0.1\"; expected a probability", "run", "--dropout", "-0.1");
    EXPECT_ERROR("--seed is \"-1\"; expected an integer from 0 to 18446744073709551615", "run",
                 "--seed", "-1");
    EXPECT_ERROR("--seed is \"18446744073709551616\"; expected", "run", "--seed",
                 "18446744073709551616");
    EXPECT_ERROR("--layout is \"sbhd\"; expected bshd or bhsd", "run", "--layout", "sbhd");
    EXPECT_ERROR("--dtype is \"f64\"; expected f32, f16 or bf16", "run", "--dtype", "f64");
    EXPECT_ERROR("--device is \"gpu\"; expected auto, cpu or cuda", "run", "--device", "gpu");
    EXPECT_ERROR("--pass is \"back\"; expected forward, backward or decode", "bench", "--pass",
                 "back");
    EXPECT_ERROR("--seq is \"512,,1024\"; expected 1 to 64 integers from 1 to", "bench", "--seq",
                 "512,,1024");
    EXPECT_ERROR("--seq is \"0\"; expected 1 to 64 integers from 1 to", "bench", "--seq", "0");
    EXPECT_ERROR("--dim is \"577\"; expected an integer from 1 to 576", "bench", "--dim", "577");
    EXPECT_ERROR("--dim-v is \"513\"; expected an integer from 1 to 512", "bench", "--dim-v",
                 "513");
    EXPECT_ERROR("q.shape[2] is 3: expected a multiple", "bench", "--heads", "3", "--heads-kv", "2",
                 "--seq", "1");
    EXPECT_ERROR("--json is \"1\"; expected no value", "info", "--json=1");
}

/* Files that are valid .npy but do not fit the problem. */
static void test_shapes(void)
{
    EXPECT_ERROR("--k b3.npy has 3 axes, --q a.npy has 4; expected the same number", "run", "--q",
                 "a.npy", "--k", "b3.npy", "--v", "a.npy", "--out", "o.npy");
    EXPECT_ERROR("--q b1.npy has 1 axis; expected 2, 3 or 4", "run", "--q", "b1.npy", "--k",
                 "b1.npy", "--v", "b1.npy", "--out", "o.npy");
    EXPECT_ERROR("--q b0.npy has 0 axes; expected 2, 3 or 4", "run", "--q", "b0.npy", "--k",
                 "b0.npy", "--v", "b0.npy", "--out", "o.npy");
    EXPECT_ERROR("--q b5.npy has 5 axes; expected 2, 3 or 4", "run", "--q", "b5.npy", "--k",
                 "b5.npy", "--v", "b5.npy", "--out", "o.npy");
    EXPECT_ERROR("--v ints.npy holds int32; expected float32, float16, bfloat16 or float64", "run",
                 "--q", "a.npy", "--k", "a.npy", "--v", "ints.npy", "--out", "o.npy");
    EXPECT_ERROR("q.shape[2] is 2: expected a multiple", "run", "--q", "a.npy", "--k", "heads3.npy",
                 "--v", "heads3.npy", "--out", "o.npy");
    EXPECT_ERROR("k.shape[3] is 1: expected 2", "run", "--q", "a.npy", "--k", "dim1.npy", "--v",
                 "dim1.npy", "--out", "o.npy");
    EXPECT_ERROR("--mask a.npy holds float32; expected bool or integers", "run", FILES, "--mask",
                 "a.npy");
    EXPECT_ERROR("--bias ints.npy holds int32; expected float32", "run", FILES, "--bias",
                 "ints.npy");
    EXPECT_ERROR("--bias b1.npy has 1 axis; expected 2, 3 or 4", "run", FILES, "--bias", "b1.npy");
    EXPECT_ERROR("bias.shape[3] is 4: expected 3", "run", FILES, "--bias", "b2.npy");
    EXPECT_ERROR("--sinks b2.npy has 2 axes; expected 1", "run", FILES, "--sinks", "b2.npy");
    EXPECT_ERROR("--sinks b1.npy has a last axis of 12; expected one value for each of the 2",
                 "run", FILES, "--sinks", "b1.npy");
    EXPECT_ERROR("--alibi b1.npy has a last axis of 12", "run", FILES, "--alibi", "b1.npy");
    EXPECT_ERROR("--alibi b2.npy has 2 axes and 12 elements; expected (heads) or (batch, heads)",
                 "run", FILES, "--alibi", "b2.npy");
    EXPECT_ERROR("dout.shape[1] is 2: expected 3", "grad", INPUTS, "--dout", "heads3.npy", "--dq",
                 "d.npy");
}

/* Lengths and pages: the file, the entry, its value and what was expected. */
static void test_lengths(void)
{
    EXPECT_ERROR("--seqlens-q a.npy has 4 axes; expected 1", "run", FILES, "--seqlens-q", "a.npy");
    EXPECT_ERROR("--seqlens-q b1.npy holds float32; expected int32 or int64", "run", FILES,
                 "--seqlens-q", "b1.npy");
    EXPECT_ERROR("--seqlens-q two.npy has 2 entries; expected 1, one for each sequence", "run",
                 FILES, "--seqlens-q", "two.npy");
    EXPECT_ERROR("--seqlens-k long.npy: entry 0 is 4; expected 0 to 3", "run", FILES, "--seqlens-k",
                 "long.npy");
    EXPECT_ERROR("--seqlens-k wide.npy: element 0 is 1099511627776; expected an integer of 32 bits",
                 "run", FILES, "--seqlens-k", "wide.npy");
    EXPECT_ERROR("--cu-seqlens-q two.npy: entry 1 is 0; expected 3 to 3", "run", FILES,
                 "--cu-seqlens-q", "two.npy", "--cu-seqlens-k", "two.npy");
    EXPECT_ERROR("--cu-seqlens-k one.npy has 1 entry; expected 2, one more than sequences", "run",
                 FILES, "--cu-seqlens-q", "zero_three.npy", "--cu-seqlens-k", "one.npy");
    EXPECT_ERROR("--block-table is given without --seqlens-k; expected both", "run", FILES,
                 "--block-table", "pages.npy");
    EXPECT_ERROR("--block-table one.npy has 1 axis; expected 2", "run", FILES, "--seqlens-k",
                 "one.npy", "--block-table", "one.npy");
    EXPECT_ERROR("--block-table is given with --cu-seqlens-k", "run", FILES, "--block-table",
                 "pages.npy", "--cu-seqlens-k", "zero_three.npy");
    EXPECT_ERROR("--block-table far.npy: entry (0, 1) is 1; expected 0 to 0, the pages of --k",
                 "run", FILES, "--seqlens-k", "long.npy", "--block-table", "far.npy");
    EXPECT_ERROR("--block-table pages.npy: entry (0, 1) is -1; expected 0 to 0", "run", FILES,
                 "--seqlens-k", "long.npy", "--block-table", "pages.npy");
    EXPECT_ERROR("--k has a batch of 1; expected 2, as there are sequences", "run", "--q", "a.npy",
                 "--k", "a.npy", "--v", "a.npy", "--out", "o.npy", "--cu-seqlens-q",
                 "zero_one_three.npy");
    EXPECT_ERROR("--k has a batch of 1; expected 3, as --q has", "run", "--q", "batch3.npy", "--k",
                 "a.npy", "--v", "a.npy", "--out", "o.npy");
}

/* "-", and where it is not allowed. */
static void test_streams(void)
{
    EXPECT_ERROR("--q and --v are both \"-\"; expected standard input for one of them", "run",
                 "--q", "-", "--k", "a.npy", "--v", "-", "--out", "o.npy");
    EXPECT_ERROR("--out and --lse are both \"-\"; expected standard output", "run", INPUTS, "--out",
                 "-", "--lse", "-");
    EXPECT_ERROR("--out is \"-\", standard output, and so is --json", "run", INPUTS, "--out", "-",
                 "--json");
    const outcome *o =
        harness_run_to_terminal((const char *const[]){"run", INPUTS, "--out", "-", NULL});
    CHECK(o->code == 2 && strstr(o->err, "which is a terminal"), "to a terminal: %s", o->err);
}

int main(int argc, char **argv)
{
    harness_begin(argc, argv);
    write_inputs();
    test_dispatch();
    test_help();
    test_options();
    test_values();
    test_shapes();
    test_lengths();
    test_streams();
    CHECK(harness_count_entries(".") == 18, "a file was written");
    return harness_end();
}
