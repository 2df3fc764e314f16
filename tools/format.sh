#!/bin/sh
# Lays out all C sources by .clang-format.
set -eu
cd "$(dirname "$0")/.."
tools/sources.sh | xargs clang-format -i
