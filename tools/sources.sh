#!/bin/sh
# Lists our C and CUDA sources and headers, one a line: what lint reads and format rewrites. The public
# header is laid out by hand, as a manual; so are the tables of kernels.
set -eu
cd "$(dirname "$0")/.."
find src kernels ladder cli reference python tests examples \
    \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) \
    -not -path 'examples/build*' -not -path ladder/rungs.h -not -path kernels/variants.h |
    LC_ALL=C sort
