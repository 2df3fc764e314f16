/*
 * `flashattn ladder run`.
 */
#ifndef FA_CLI_LADDER_RUN_H
#define FA_CLI_LADDER_RUN_H

int rungs_verify(int argc, char **argv);

#endif
