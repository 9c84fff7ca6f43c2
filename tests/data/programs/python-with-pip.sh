#!/bin/bash
# A Python whose virtual environments are this script. It writes down what pip is asked for and installs no
# more than torch's version.
home=$(dirname "$(dirname "$0")")
case "$*" in
    "-m venv "*)
        printf '%s\n' "$*" >> "$WORK/asked"
        mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-m pip --version") [ ! -e "$WORK/no-pip" ] ;;
    "-m pip uninstall "*) printf '%s\n' "$*" >> "$WORK/asked"; rm "$WORK/torch" ;;
    "-m pip "*)
        printf '%s\n' "$*" >> "$WORK/asked"
        if [ -e "$WORK/slow" ]; then
            echo 2.9.1 > "$WORK/torch"
            echo "Collecting numpy==1.26.4 (from flowspec)"
            echo "  Downloading numpy-1.26.4-cp311-cp311-manylinux_2_17_aarch64.whl (14.2 MB)"
            trap 'echo "ERROR: Operation cancelled by user" >&2; exit 1' INT
            sleep 30
        fi
        if [[ "$*" == *"--index-url"* ]]; then
            [ -e "$WORK/online" ] || { echo "ERROR: no such host" >&2; exit 1; }
            echo "${@: -1}" | sed 's/torch==//' > "$WORK/torch"
        elif [ ! -e "$WORK/torch" ]; then
            echo 2.9.1 > "$WORK/torch"
        fi
        ;;
    *'m.version("torch")'*) cat "$WORK/torch" ;;
    *'torch.cuda.is_available()'*) cat "$WORK/cuda" || { echo "ImportError: libcudnn.so.9" >&2; exit 1; } ;;
    *) exec REAL "$@" ;;
esac
