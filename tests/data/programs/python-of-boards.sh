#!/bin/bash
# A Python without venv and pip, which would take minutes: a virtual environment is this script, its packages
# the tests' own.
case "$*" in
    "-m venv "*)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
        printf '#!/bin/sh\nexec "%s" -m flowspec.cli.main "$@"\n' "$3/bin/python" > "$3/bin/flowspec"
        chmod +x "$3/bin/flowspec"
        ;;
    "-m pip "*) printf '%s\n' "$*" >> "$HOME/pip" ;;
    *'m.version("torch")'*) cat "$HOME/torch" ;;
    *) PYTHONPATH=$HOME/flowspec/source exec REAL "$@" ;;
esac
