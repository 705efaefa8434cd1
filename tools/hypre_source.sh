#!/bin/sh
# Fetch hypre's sources from Debian's source package into build/hypre-source, and print that folder:
#     HYPRE_SOURCE=$(tools/hypre_source.sh) pip install .
# No root is needed and nothing of the system is changed: the indices of the source packages are kept
# in build/. On other systems download a release of hypre, and give its folder as HYPRE_SOURCE.
set -eu
cd "$(dirname "$0")/.."

folder=$PWD/build/hypre-source
[ ! -e "$folder/src/utilities/mpistubs.c" ] || { echo "$folder"; exit 0; }
for program in apt-get dpkg-source; do
    command -v $program > /dev/null || {
        echo "hypre_source: $program was not found. Install dpkg-dev (Debian, Ubuntu), or download a" \
            "release of hypre and set HYPRE_SOURCE to its folder." >&2
        exit 1
    }
done

apt=$PWD/build/apt
rm -rf "$apt" "$folder"
mkdir -p "$apt/sources" "$apt/lists/partial" "$apt/cache"
for file in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/ubuntu.sources; do
    [ ! -e "$file" ] || sed 's/^Types:.*/Types: deb-src/' "$file" > "$apt/sources/$(basename "$file")"
done
[ ! -e /etc/apt/sources.list ] ||
    sed -n 's/^deb /deb-src /p' /etc/apt/sources.list > "$apt/sources/main.list"
fetch() {
    apt-get -qq -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$apt/sources" \
        -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User= "$@" >&2
}
fetch update
# apt-get checks the signature of the index, and the package against the index.
(cd "$apt" && fetch source --download-only hypre)
dpkg-source --no-check --extract "$apt"/hypre_*.dsc "$folder" > "$apt/extract.log"
rm -rf "$apt"
echo "$folder"
