#!/bin/sh
# Counts the instructions of one decision of llm-aware, booking and release included: a measure that noise does not reach.
# usage: instructions.sh          prints the counts
#        instructions.sh --write  keeps them as the baseline, instructions.txt
#        instructions.sh --check  fails when a count is more than 10 % above the baseline
set -eu
cd "$(dirname "$0")/../.."
baseline=bench/micro/instructions.txt
cargo build --quiet --release --example instructions
program=${CARGO_TARGET_DIR:-target}/release/examples/instructions
total() { valgrind --tool=callgrind --callgrind-out-file=/dev/null "$program" "$@" 2>&1 | awk '/Collected/ { print $NF }'; }
# Two runs of different length: what is not a decision is in both. Conversations take turns, so that many are met.
per_pick() { echo $((($(total "$1" "$2" 1100) - $(total "$1" "$2" 100)) / 1000)); }
counts() {
  for case in new remembered home-full all-full; do
    for n in 3 64 1000; do echo "$case $n $(per_pick $case $n)"; done
  done
}
case ${1-} in
  --write) counts | tee "$baseline" ;;
  --check) counts | awk -v file="$baseline" '
      BEGIN { while ((getline line < file) > 0) { split(line, f, " "); was[f[1] " " f[2]] = f[3] } }
      { key = $1 " " $2; grown = was[key] ? $3 / was[key] : 99; print $0, "was", was[key] + 0; if (grown > 1.1) bad = bad " " $1 "/" $2 }
      END { if (bad) { print "more than 10 % above " file ":" bad; exit 1 } }' ;;
  *) counts ;;
esac
