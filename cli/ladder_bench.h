/*
 * `flashattn ladder bench`.
 */
#ifndef FA_CLI_LADDER_BENCH_H
#define FA_CLI_LADDER_BENCH_H

int rungs_bench(int argc, char **argv);

#endif
