#!/bin/sh
# Lists our C sources and headers, one a line: what lint reads and format rewrites. The public header
# is laid out by hand, as a manual.
set -eu
cd "$(dirname "$0")/.."
find src cli reference tests examples -name '*.[ch]' -not -path 'examples/build*' | LC_ALL=C sort
