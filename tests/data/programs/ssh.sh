#!/bin/bash
while [ "$1" != -- ]; do
    [ "$1" = -o ] && printf '%s\n' "$2" >> "$HOMES/options"
    shift
done
[ "$2" != gone ] || { echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255; }
if [ "$2" = evil ]; then
    printf '\033]52;c;aGk=\007said\233\n'; echo -e 'why\e[2J' >&2; exit "${EVIL_STATUS:-0}"
fi
unset PYTHON PYTHONPATH
export HOME=$HOMES/$2
mkdir -p "$HOME"
cd "$HOME"
printf '%s\n' "$3" >> ../commands
exec bash -c "$3"
