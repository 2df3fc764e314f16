/*
 * The subcommands. Each is a function in the file of its name: it takes the arguments from the
 * subcommand's name on, and returns the exit code. cmd_grad is in run.c.
 */
#ifndef FA_CLI_COMMANDS_H
#define FA_CLI_COMMANDS_H

/* Exit codes. */
enum {
    CLI_FINE = 0,
    CLI_WRONG = 1, /* the command worked, and a result was wrong */
    CLI_BAD = 2    /* bad usage or input, or this machine cannot do what was asked */
};

int cmd_run(int argc, char **argv);
int cmd_grad(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_job(int argc, char **argv);
int cmd_ladder(int argc, char **argv);
int cmd_info(int argc, char **argv);

#endif
