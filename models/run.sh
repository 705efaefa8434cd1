#!/bin/sh
# Run the models (README.md). Without arguments all of them, else one: guard or shared_sum.
set -u
cd "$(dirname "$0")" || exit 1
for tool in spin gcc; do
    command -v $tool >/dev/null || {
        echo "models: skipped, because $tool was not found (Debian: apt-get install spin gcc)"
        exit 0
    }
done
models=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failed=0

# expect none|error MODEL [-DNAME=VALUE ...]
expect() {
    wanted=$1 model=$2
    shift 2
    spin -a "$@" "$models/$model.pml" >spin.log 2>&1 && gcc -O1 -w -DSAFETY -DMEMLIM=2000 -o pan pan.c ||
        { cat spin.log; exit 1; }
    ./pan -m100000 >pan.log
    found=none
    grep -q "errors: 0" pan.log || found=error
    # A search that was cut off proves nothing.
    grep -Eq "^error|max search depth|MEMLIM bound" pan.log && found=unknown
    states=$(sed -n 's/ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
    printf '%-11s %-36s %9s states, %s\n' "$model" "$*" "$states" \
        "$([ $found = error ] && sed -n 's/^pan:1: \([a-z ]*\).*/error: \1/p' pan.log || echo "errors: $found")"
    [ $found = $wanted ] || { echo "models: expected ${wanted}"; failed=1; }
}

only=${1:-all}
case $only in all | shared_sum)
    expect none shared_sum -DRANKS=2 -DSUMS=4
    expect none shared_sum -DRANKS=3 -DSUMS=3
    for mutant in 1 2 3 4 5 6 7 8; do
        expect error shared_sum -DRANKS=2 -DSUMS=4 -DMUTANT=$mutant
    done
esac
# The same protocol in C, by GenMC if it is installed (its path may be in GENMC).
GENMC=$(command -v "${GENMC:-genmc}") || GENMC=
# genmc none|error ARGUMENTS
genmc() {
    wanted=$1
    shift
    "$GENMC" --disable-estimation "$@" "$models/shared_sum.c" >genmc.log 2>&1
    said=$(sed -n 's/^Error: \(.*\)!/\1/p; s/^No errors.*/none/p' genmc.log)
    found=error
    [ "$said" = none ] && found=none
    [ "$said" ] || found=unknown
    printf '%-11s %-36s %9s executions, error: %s\n' genmc "$*" \
        "$(sed -n 's/^Number of complete executions explored: //p' genmc.log)" "$said"
    [ "$found" = "$wanted" ] || { echo "models: expected ${wanted}"; failed=1; }
}
case $only in all | shared_sum)
    if [ "$GENMC" ]; then
        genmc none --rc11 -- -DRANKS=2
        genmc none --imm -- -DRANKS=2
        genmc none --rc11 -- -DRANKS=3 -DSUMS=4
        for mutant in 1 2 3 4 5 6 7 8; do genmc error --rc11 -- -DMUTANT=$mutant; done
    else
        echo "models: genmc was not found, so shared_sum.c is skipped (shared_sum.pml is the same protocol)"
    fi
esac
case $only in all | guard)
    for program in 1 2 3 4; do
        expect none guard -DPROTOCOL=3 -DPROGRAM=$program
    done
    expect none guard -DPROTOCOL=2 -DPROGRAM=1
    expect none guard -DPROTOCOL=2 -DPROGRAM=2
    expect error guard -DPROTOCOL=2 -DPROGRAM=3
    expect error guard -DPROTOCOL=2 -DPROGRAM=4
    expect error guard -DPROTOCOL=1 -DPROGRAM=1
    expect error guard -DPROTOCOL=0 -DPROGRAM=1
    expect error guard -DPROTOCOL=3 -DPROGRAM=2 -DMARKS=0
    expect error guard -DPROTOCOL=3 -DPROGRAM=2 -DMARKS=1
    expect error guard -DPROTOCOL=3 -DPROGRAM=1 -DPUBLISH=1
esac
exit $failed
